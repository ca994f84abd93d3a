"use strict";
(() => {
  const form = document.getElementById("controls");
  const answer = document.getElementById("answer");
  const figures = [...document.querySelectorAll("[data-figure]")];
  const status = document.getElementById("status");
  let running = new AbortController();

  // The state as a query: controls left empty are left out.
  const query = () => {
    const values = [...new FormData(form)].map(([name, value]) => [name, value.trim()]);
    return new URLSearchParams(values.filter(([, value]) => value !== "")).toString();
  };

  const busy = (is) => document.getElementById("figures").setAttribute("aria-busy", is);

  const drawFigures = async (state, signal) => {
    busy(true);
    for (const holder of figures) {
      const response = await fetch("/figure/" + holder.dataset.figure + "?" + state, { signal });
      holder.innerHTML = response.ok ? await response.text() : "";
      holder.classList.remove("stale");
      window.enhance(holder);
    }
    busy(false);
  };

  // Asks the planner, keeps the address a link to what is shown, then draws; a newer question ends an older one.
  const update = async () => {
    running.abort();
    running = new AbortController();
    const { signal } = running;
    const state = query();
    history.replaceState(null, "", "/?" + state);
    busy(true);
    for (const holder of figures) holder.classList.add("stale");
    try {
      const response = await fetch("/answer?" + state, { signal });
      answer.innerHTML = await response.text();
      window.enhance(answer);
      status.textContent = answer.querySelector(".verdict, .error").textContent;
      if (response.ok) await drawFigures(state, signal);
      else {
        for (const holder of figures) holder.replaceChildren();
        busy(false);
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      answer.innerHTML = '<p class="error" role="alert">No answer: is magicdec explore still running?</p>';
    }
  };

  let waiting;
  let asked = query();
  const ask = () => {
    if (query() === asked) return;
    asked = query();
    update();
  };
  for (const kind of ["input", "change"]) {
    form.addEventListener(kind, () => { clearTimeout(waiting); waiting = setTimeout(ask, 150); });
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });

  // Less and more: counts of sequences and tokens double and halve, the others move by one notch.
  const START = { tp: 8, budget: 512, gamma: 3, acceptance: 0.8 };
  const moved = (name, text, step) => {
    const value = Number(text);
    if (text.trim() === "" || !Number.isFinite(value)) return START[name] ?? text;
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

  if (!answer.querySelector(".error")) drawFigures(query(), running.signal).catch(() => {});
})();
