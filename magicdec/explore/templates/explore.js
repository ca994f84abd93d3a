"use strict";
(() => {
  const form = document.getElementById("controls");
  const asksRate = () => Boolean(form.elements.rate.value.trim() || form.elements.requests.value);
  const answer = document.getElementById("answer");
  const figures = [...document.querySelectorAll("[data-figure]")];
  const status = document.getElementById("status");
  let running = new AbortController();
  // The server counts who waits by these names: what this page gives up goes on for others.
  const page = Math.random().toString(36).slice(2);
  const as = (asker, rest) => ({ headers: { "X-Asker": asker }, ...rest });

  // The state as a query: controls left empty are left out.
  const query = () => {
    const values = [...new FormData(form)].map(([name, value]) => [name, value.trim()]);
    return new URLSearchParams(values.filter(([, value]) => value !== "")).toString();
  };

  const busy = (is) => document.getElementById("figures").setAttribute("aria-busy", is);

  const drawFigures = async (state, signal) => {
    busy(true);
    const late = (holder) => holder.dataset.figure === "best"; // it asks for twenty plans
    for (const holder of [...figures].sort((a, b) => late(a) - late(b))) {
      const response = await fetch("/figure/" + holder.dataset.figure + "?" + state, as(page, { signal }));
      holder.innerHTML = response.ok ? await response.text() : "";
      holder.classList.remove("stale");
      window.enhance(holder);
    }
    busy(false);
  };

  // What stays while a question has no answer: the last answer and its figures, under an error's line or the progress.
  const showAbove = (html) => {
    answer.querySelectorAll(":scope > .error, :scope > .progress, .last").forEach((each) => each.remove());
    const last = answer.querySelector(".verdict") ? '<p class="last">The last answer and its figures:</p>' : "";
    answer.insertAdjacentHTML("afterbegin", html + last);
  };
  const showError = (html) => {
    showAbove(html);
    for (const holder of figures) holder.classList.remove("stale");
    busy(false);
  };

  // The planner's answer, however long it takes; until then `show` has how far it is.
  const answerTo = async (state, signal, show, asker = page, path = "/answer?") => {
    for (;;) {
      const response = await fetch(path + state, as(asker, { signal }));
      const html = await response.text();
      if (response.status !== 202) return { ok: response.ok, html };
      show(html);
      await new Promise((done) => setTimeout(done, 400));
    }
  };
  // A computation that nobody waits for any more ends.
  let awaited = "";
  const giveUp = () => { if (awaited) fetch("/answer?" + awaited, as(page, { method: "DELETE", keepalive: true })); };
  addEventListener("pagehide", giveUp);

  // Asks the planner, keeps the address a link to what is shown, then draws; a newer question ends an older one.
  const update = async (isMove = true) => {
    running.abort();
    giveUp();
    running = new AbortController();
    const { signal } = running;
    const state = query();
    awaited = asksRate() && state;
    eachGpu.forget();
    if (isMove) history.pushState(null, "", "/?" + state + location.hash);
    busy(true);
    for (const holder of figures) holder.classList.add("stale");
    try {
      const { ok, html } = await answerTo(state, signal, (progress) => {
        if (!answer.querySelector(".progress")) status.textContent = "Simulating";
        showAbove(progress);
      });
      awaited = "";
      if (!ok) {
        showError(html);
        status.textContent = answer.querySelector(".error").textContent;
        return;
      }
      answer.innerHTML = html;
      window.enhance(answer);
      const pinned = new URLSearchParams(location.hash.slice(1)).get("setting");
      if (pinned !== null) showDifference(pinned);
      status.textContent = answer.querySelector(".verdict").textContent;
      offerDrafts(state, signal);
      await drawFigures(state, signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      showError('<p class="error" role="alert">No answer: is magicdec explore still running?</p>');
    }
  };

  // At a rate and for a trace the batch is what comes, and the field waits until it counts again.
  const batch = form.elements.batch;
  let batchBefore = batch.value || form.dataset.batch || "";
  const lockBatch = (isLocked) => {
    if (isLocked) {
      batchBefore = batch.value || batchBefore;
      batch.value = "";
    } else if (batch.disabled) batch.value = batch.value || batchBefore;
    batch.disabled = isLocked;
    batch.placeholder = isLocked ? "searched" : form.dataset.batch;
    for (const button of batch.parentElement.querySelectorAll("button")) button.disabled = isLocked;
  };

  // Limits are means, or percentiles at a rate: a limit goes along when the question changes.
  const OF_RATE = { ttft_ms: "p95_ttft_ms", tpot_ms: "p95_tpot_ms" };
  const matchLimits = () => {
    const isRate = asksRate();
    form.classList.toggle("asks-arrivals", isRate);
    form.classList.toggle("asks-steady", !isRate);
    for (const names of Object.entries(OF_RATE)) {
      const [to, from] = (isRate ? names.toReversed() : names).map((name) => form.elements[name]);
      if (!to.value.trim()) to.value = from.value;
      from.value = "";
    }
    document.getElementById("each-gpu").hidden = isRate;
    form.elements.gen_len.placeholder = form.elements.task.value ? "task's" : "decoding";
    lockBatch(isRate);
  };

  let waiting;
  let asked = query();
  const ask = () => {
    if (query() === asked) return;
    const { rate, gen_len } = form.elements;
    if (rate.value.trim() && !gen_len.value.trim()) gen_len.value = START.gen_len;
    matchLimits();
    asked = query();
    update();
  };
  for (const kind of ["input", "change"]) {
    form.addEventListener(kind, (event) => {
      if (event.target.closest(".combo, .upload")) return; // these ask when something is chosen
      clearTimeout(waiting);
      waiting = setTimeout(ask, 150);
    });
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });

  // Back and forward: the controls say what the address says, and the planner answers that.
  const defaults = new Map([...form.elements].filter(({ name }) => name).map(({ name }) => [name, form.dataset[name] ?? ""]));
  const fill = (given) => {
    for (const [name, value] of defaults) setValue(form.elements[name], given.get(name) ?? value);
    matchLimits();
    showFile();
  };
  window.addEventListener("popstate", () => {
    fill(new URLSearchParams(location.search));
    clearTimeout(waiting);
    showBeside();
    if (query() === asked) return;
    asked = query();
    update(false);
  });

  // A second setting beside the first: kept in the address after the #, so that the link shows both.
  const beside = document.getElementById("beside");
  // What the two settings differ in, and what became of the answer, in the server's words.
  const showDifference = async (pinned) => {
    const response = await fetch("/changed?" + query() + "&" + new URLSearchParams({ was: pinned }), as(page));
    if (response.ok) document.getElementById("difference").textContent = await response.text();
  };
  const showBeside = async () => {
    const pinned = new URLSearchParams(location.hash.slice(1)).get("setting");
    beside.hidden = pinned === null;
    if (pinned === null) return;
    document.getElementById("pinned").href = "/?" + pinned;
    const show = (html) => { beside.lastElementChild.innerHTML = html; };
    show((await answerTo(pinned, undefined, show, page + " beside")).html);
    showDifference(pinned);
    window.enhance(beside);
  };
  const pin = (pinned) => {
    const hash = pinned === null ? "" : "#" + new URLSearchParams({ setting: pinned });
    history.pushState(null, "", location.pathname + location.search + hash);
    showBeside();
  };
  document.getElementById("pin").addEventListener("click", () => pin(query()));
  document.getElementById("unpin").addEventListener("click", () => pin(null));
  showBeside();

  // A value that a select does not offer yet is added to it.
  const setValue = (control, value) => {
    if (control.tagName === "SELECT" && value && ![...control.options].some((option) => option.value === value))
      control.add(new Option(value, value));
    control.value = value;
  };

  // Only drafts that can exist for the model, on the engine.
  const offerDrafts = async (state, signal) => {
    const response = await fetch("/drafts?" + state, as(page, { signal }));
    if (!response.ok) return;
    const select = form.elements.draft;
    const chosen = select.value;
    select.replaceChildren(select.options[0], ...(await response.json()).map((name) => new Option(name, name)));
    setValue(select, chosen);
  };

  // Type-ahead: a list under the field, by any part of a name or of what it is called else.
  const plain = (text) => text.toLowerCase().replace(/[^a-z0-9.]+/g, "");
  const MOST_SHOWN = 60;
  for (const input of form.querySelectorAll("input[list]")) {
    const names = [...input.list.options].map((option) => ({
      value: option.value, also: option.textContent, key: plain(option.value), keys: plain(option.value + " " + option.textContent),
    }));
    input.removeAttribute("list"); // the browser's own list shows only what the field already says
    const list = Object.assign(document.createElement("ul"), { id: "list-" + input.name, hidden: true });
    list.setAttribute("role", "listbox");
    list.setAttribute("aria-label", document.querySelector(`label[for="${input.id}"]`).textContent);
    for (const [name, value] of Object.entries({ role: "combobox", "aria-expanded": "false", "aria-autocomplete": "list", "aria-controls": list.id }))
      input.setAttribute(name, value);
    const holder = Object.assign(document.createElement("span"), { className: "combo" });
    input.replaceWith(holder);
    holder.append(input, list);
    let at = -1;
    const shown = () => [...list.querySelectorAll("[role=option]")];
    const close = () => { list.hidden = true; at = -1; input.setAttribute("aria-expanded", "false"); input.removeAttribute("aria-activedescendant"); };
    const choose = (value) => { input.value = value; close(); ask(); };
    const point = (to) => {
      const rows = shown();
      if (!rows.length) return;
      at = (to + rows.length) % rows.length;
      rows.forEach((row, place) => row.setAttribute("aria-selected", place === at));
      rows[at].scrollIntoView({ block: "nearest" });
      input.setAttribute("aria-activedescendant", rows[at].id);
    };
    const open = (text) => {
      const counted = /^\s*((?:\d+\s*[x*]\s*)+)/i.exec(input.name === "hardware" ? text : "")?.[1] ?? "";
      const parts = text.slice(counted.length).split(/[\s/_-]+/).map(plain).filter(Boolean);
      const rank = ({ key }) => (key.startsWith(parts.join("")) ? 0 : key.startsWith(parts[0] ?? "") ? 1 : 2);
      const found = names.filter(({ keys }) => parts.every((part) => keys.includes(part))).sort((a, b) => rank(a) - rank(b));
      list.replaceChildren(...found.slice(0, MOST_SHOWN).map(({ value, also }, place) => {
        const row = Object.assign(document.createElement("li"), { id: `${list.id}-${place}`, textContent: counted.replace(/\s/g, "") + value });
        row.setAttribute("role", "option");
        row.setAttribute("aria-selected", "false");
        if (also) row.append(Object.assign(document.createElement("small"), { textContent: also }));
        row.dataset.value = counted.replace(/\s/g, "") + value;
        return row;
      }));
      if (!found.length) {
        const nothing = input.name === "task" ? "none by this name; a mixture is like chat=70,code=30" : "none by this name";
        const row = Object.assign(document.createElement("li"), { className: "none", textContent: nothing });
        row.setAttribute("role", "presentation");
        list.append(row);
      }
      at = -1;
      list.hidden = false;
      input.setAttribute("aria-expanded", "true");
    };
    input.addEventListener("click", () => { if (list.hidden) { open(""); setTimeout(() => input.select()); } });
    input.addEventListener("input", () => open(input.value));
    input.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        event.preventDefault();
        const step = event.key === "ArrowDown" ? 1 : -1;
        if (list.hidden) open(""); else point(at < 0 && step < 0 ? -1 : at + step);
      } else if (event.key === "Enter") {
        event.preventDefault();
        const row = shown()[at];
        if (row) choose(row.dataset.value); else choose(input.value);
      } else if (event.key === "Escape" && !list.hidden) {
        event.preventDefault();
        close();
      }
    });
    input.addEventListener("blur", () => { close(); ask(); });
    list.addEventListener("pointerdown", (event) => event.preventDefault()); // the field keeps the focus
    list.addEventListener("click", (event) => {
      const row = event.target.closest("[role=option]");
      if (row) choose(row.dataset.value);
    });
  }

  // A file of requests goes up once, and is asked for by the name that the server gives it.
  const token = form.elements.requests;
  const upload = token.parentElement;
  const picker = upload.querySelector("input[type=file]");
  const dropper = upload.querySelector(".drop");
  const shownName = upload.querySelector(".pick");
  const unnamed = shownName.textContent;
  const uploaded = upload.querySelector("[role=status]");
  const MOST_BYTES = 32e6;
  const showFile = () => {
    const name = token.value.replace(/^[0-9a-f]{16}-/, "");
    upload.querySelector(".upload").classList.toggle("has-file", Boolean(name));
    dropper.hidden = !name;
    shownName.textContent = name || unnamed;
    uploaded.textContent = name && `${name} is uploaded`;
  };
  let sending;
  picker.addEventListener("change", () => {
    sending?.abort();
    const [file] = picker.files;
    if (!file) return;
    if (file.size > MOST_BYTES) {
      showError('<p class="error" role="alert"></p>');
      answer.querySelector(".error").textContent = `${file.name} is larger than ${MOST_BYTES / 1e6} MB; magicdec plan --requests reads it from disk`;
      picker.value = "";
      return;
    }
    sending = new XMLHttpRequest(); // fetch does not say how far an upload is
    sending.upload.addEventListener("progress", ({ loaded, total }) => {
      shownName.textContent = `sending, ${Math.round((100 * loaded) / Math.max(total, 1))} %`;
    });
    sending.addEventListener("load", () => {
      picker.value = "";
      if (sending.status === 200) token.value = sending.responseText;
      else showError(sending.responseText);
      showFile();
      ask();
    });
    sending.addEventListener("error", () => { picker.value = ""; showFile(); shownName.textContent = "not sent"; });
    sending.open("POST", "/upload?" + new URLSearchParams({ name: file.name }));
    sending.setRequestHeader("X-Asker", page);
    sending.send(file);
  });
  dropper.addEventListener("click", () => { token.value = ""; showFile(); picker.focus(); ask(); });

  // A pasted command: what to change stands above the answer, and the controls say what it asks.
  const checked = document.getElementById("checked");
  const paste = document.getElementById("paste-form");
  paste.addEventListener("submit", async (event) => {
    event.preventDefault();
    const body = new URLSearchParams({ command: paste.elements.command.value, state: query() });
    checked.hidden = false;
    checked.firstElementChild.textContent = "Reading …";
    try {
      const response = await fetch("/check", as(page, { method: "POST", body }));
      checked.firstElementChild.innerHTML = await response.text();
    } catch {
      checked.firstElementChild.innerHTML = '<p class="error" role="alert">No answer: is magicdec explore still running?</p>';
    }
    const given = checked.querySelector("[data-fill]")?.dataset.fill;
    if (given !== undefined) {
      fill(new URLSearchParams(given));
      ask();
    }
    checked.scrollIntoView({ block: "nearest" });
  });

  // The best drafts on other GPUs, when they are asked for.
  const eachGpu = {
    panel: document.querySelector("#each-gpu > div"),
    button: document.getElementById("compare"),
    running: new AbortController(),
    forget() { this.running.abort(); this.panel.replaceChildren(); this.button.hidden = false; },
    async ask() {
      this.running = new AbortController();
      const { signal } = this.running;
      this.button.hidden = true;
      try {
        const show = (html) => { this.panel.innerHTML = html; };
        show((await answerTo(query(), signal, show, page + " gpus", "/gpus?")).html);
        window.enhance(this.panel);
      } catch (error) {
        if (error.name !== "AbortError") throw error;
      }
    },
  };
  eachGpu.button.addEventListener("click", () => eachGpu.ask());

  // Less and more: counts of sequences and tokens double and halve, the others move by one notch.
  const START = { tp: 8, budget: 512, draft_tp: 1, gamma: 3, acceptance: 0.8, tpot_ms: 30, ttft_ms: 1000, gen_len: 256, price: 2, gpus: 8, temperature: 1,
    p95_ttft_ms: 1000, p95_tpot_ms: 50, pp: 2, ep: 8, top_p: 0.95, top_k: 50, burstiness: 1 };
  const moved = (name, text, step) => {
    const scale = { k: 1024, m: 1024 ** 2 }[text.trim().slice(-1).toLowerCase()];
    const value = scale ? Number(text.trim().slice(0, -1)) * scale : Number(text);
    if (text.trim() === "" || !Number.isFinite(value)) return START[name] ?? text;
    if (name === "gamma") return Math.max(1, value + step);
    if (name === "temperature" || name === "burstiness") return Math.max(0, Math.round((value + step * 0.1) * 10) / 10);
    if (name === "acceptance" || name === "top_p") return Math.min(1, Math.max(0, Math.round((value + step * 0.05) * 100) / 100));
    return Math.max(1, Math.round(value * 2 ** step));
  };
  for (const button of form.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => {
      const input = form.elements[button.dataset.for];
      input.value = moved(input.name, input.value, Number(button.dataset.step));
      ask();
    });
  }

  showFile();
  if (answer.querySelector(".progress")) update(false);
  else if (!answer.querySelector(".error")) drawFigures(query(), running.signal).catch(() => {});
})();
