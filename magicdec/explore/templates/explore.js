"use strict";
(() => {
  const form = document.getElementById("controls");
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
  const answerTo = async (state, signal, show, asker = page) => {
    for (;;) {
      const response = await fetch("/answer?" + state, as(asker, { signal }));
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
    awaited = form.elements.rate.value.trim() && state;
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
      await drawFigures(state, signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      showError('<p class="error" role="alert">No answer: is magicdec explore still running?</p>');
    }
  };

  let waiting;
  let asked = query();
  const ask = () => {
    if (query() === asked) return;
    const { rate, gen_len } = form.elements;
    if (rate.value.trim() && !gen_len.value.trim()) gen_len.value = START.gen_len;
    asked = query();
    update();
  };
  for (const kind of ["input", "change"]) {
    form.addEventListener(kind, () => { clearTimeout(waiting); waiting = setTimeout(ask, 150); });
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });

  // Back and forward: the controls say what the address says, and the planner answers that.
  const defaults = new Map([...new FormData(form)].map(([name]) => [name, form.dataset[name] ?? ""]));
  window.addEventListener("popstate", () => {
    const given = new URLSearchParams(location.search);
    for (const [name, value] of defaults) form.elements[name].value = given.get(name) ?? value;
    clearTimeout(waiting);
    showBeside();
    if (query() === asked) return;
    asked = query();
    update(false);
  });

  // A second setting beside the first: kept in the address after the #, so that the link shows both.
  const beside = document.getElementById("beside");
  // What the two settings differ in, and both speedups.
  const showDifference = (pinned) => {
    const [one, other] = [new URLSearchParams(query()), new URLSearchParams(pinned)];
    const value = (params, name) => params.get(name) ?? form.dataset[name] ?? "auto";
    const names = [...new Set([...one.keys(), ...other.keys()])].filter((name) => value(one, name) !== value(other, name));
    const label = (name) => document.querySelector(`label[for="control-${name}"]`)?.textContent ?? name;
    const number = (text) => (/^\d{5,}$/.test(text) ? Number(text).toLocaleString("en").replaceAll(",", "\u202f") : text);
    const text = names.map((name) => `${label(name)} was ${number(value(other, name))}, now ${number(value(one, name))}`);
    document.getElementById("difference").textContent = text.length ? `${text.join("; ")}.` : "The same as this one so far.";
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

  // Less and more: counts of sequences and tokens double and halve, the others move by one notch.
  const START = { tp: 8, budget: 512, draft_tp: 1, gamma: 3, acceptance: 0.8, tpot_ms: 30, ttft_ms: 1000, gen_len: 256, price: 2, gpus: 8, temperature: 1,
    rate: 4, p95_ttft_ms: 1000, p95_tpot_ms: 50 };
  const moved = (name, text, step) => {
    const value = Number(text);
    if (text.trim() === "" || !Number.isFinite(value)) return START[name] ?? text;
    if (name === "rate") return Number((value * 2 ** step).toPrecision(4));
    if (name === "gamma") return Math.max(1, value + step);
    if (name === "acceptance") return Math.min(1, Math.max(0, Math.round((value + step * 0.05) * 100) / 100));
    return Math.max(1, Math.round(value * 2 ** step));
  };
  for (const button of form.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => {
      const input = form.elements[button.dataset.for];
      input.value = moved(input.name, input.value, Number(button.dataset.step));
      ask();
    });
  }

  if (answer.querySelector(".progress")) update(false);
  else if (!answer.querySelector(".error")) drawFigures(query(), running.signal).catch(() => {});
})();
