"use strict";
(() => {
  document.documentElement.classList.add("scripted");
  const tooltip = document.getElementById("tooltip");

  // Values at the marks: pointer, touch, and arrow keys on a focused figure.
  const show = (tip, x, y) => {
    tooltip.textContent = tip.dataset.tip;
    tooltip.hidden = false;
    const box = tooltip.getBoundingClientRect();
    tooltip.style.left = Math.max(4, Math.min(x + 12, innerWidth - box.width - 4)) + "px";
    tooltip.style.top = (y - box.height - 10 > 0 ? y - box.height - 10 : y + 16) + "px";
  };
  const hide = () => { tooltip.hidden = true; };
  const enhanceFigure = (svg) => {
    for (const tip of svg.querySelectorAll(".tip")) tip.querySelector("title")?.remove();
    svg.addEventListener("pointermove", (event) => {
      const tip = event.target.closest(".tip");
      if (tip) show(tip, event.clientX, event.clientY); else hide();
    });
    svg.addEventListener("pointerdown", (event) => {
      const tip = event.target.closest(".tip");
      if (tip) show(tip, event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    const readout = svg.parentElement.querySelector(".visually-hidden");
    let current;
    const leave = () => { current?.classList.remove("on"); readout.textContent = ""; hide(); };
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const tips = [...svg.querySelectorAll(".tip:not(.off)")];
      if (!step || !tips.length) return;
      event.preventDefault();
      leave();
      const at = tips.indexOf(current);
      current = tips[at < 0 ? (step > 0 ? 0 : tips.length - 1) : (at + step + tips.length) % tips.length];
      current.classList.add("on");
      readout.textContent = current.dataset.tip;
      const box = current.getBoundingClientRect();
      show(current, box.right, box.top);
    });
    svg.addEventListener("blur", leave);
    enhanceSeries(svg);
  };
  addEventListener("scroll", hide, { passive: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // Series that can be hidden, where a figure has several.
  const enhanceSeries = (svg) => {
    const marks = [...svg.querySelectorAll("[data-series]")];
    const names = [...new Set(marks.map((mark) => mark.dataset.series))];
    if (names.length < 2) return;
    const holder = document.createElement("div");
    holder.className = "series";
    holder.setAttribute("role", "group");
    holder.setAttribute("aria-label", "Series shown");
    for (const name of names) {
      const label = document.createElement("label");
      const box = document.createElement("input");
      box.type = "checkbox";
      box.checked = true;
      box.addEventListener("change", () => {
        for (const mark of marks) if (mark.dataset.series === name) mark.classList.toggle("off", !box.checked);
      });
      label.append(box, name);
      holder.append(label);
    }
    svg.after(holder);
  };

  // Tables: click a heading to sort, once more to turn it round; type to filter.
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const [x, y] = [Number(a), Number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
  };
  const enhanceTable = (holder) => {
    const body = holder.querySelector("tbody");
    const heads = [...holder.querySelectorAll("th")];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const value = (row) => row.cells[column].dataset.sort;
        const rows = [...body.rows].sort((a, b) => {
          const [x, y] = [value(a), value(b)];
          return x === "" || y === "" ? compare(x, y) : (down ? -1 : 1) * compare(x, y);
        });
        body.append(...rows);
      });
    });
    holder.querySelector("[data-filter]")?.addEventListener("input", (event) => {
      const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
  };

  // The slider over the precomputed values of each gamma.
  const enhanceSlider = (slider) => {
    const input = slider.querySelector("input");
    const output = slider.querySelector("output");
    const steps = [...slider.querySelectorAll("li")];
    const update = () => {
      const step = steps[input.value];
      const gamma = "γ = " + step.dataset.gamma;
      input.setAttribute("aria-valuetext", gamma);
      output.textContent = gamma + ": " + step.textContent;
    };
    input.addEventListener("input", update);
    update();
  };

  window.enhance = (root) => {
    root.querySelectorAll("svg.chart").forEach(enhanceFigure);
    root.querySelectorAll(".table").forEach(enhanceTable);
    root.querySelectorAll(".slider").forEach(enhanceSlider);
  };
  window.enhance(document);
})();
