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
  for (const svg of document.querySelectorAll("svg.chart")) {
    const tips = [...svg.querySelectorAll(".tip")];
    for (const tip of tips) tip.querySelector("title")?.remove();
    svg.addEventListener("pointermove", (event) => {
      const tip = event.target.closest(".tip");
      if (tip) show(tip, event.clientX, event.clientY); else hide();
    });
    svg.addEventListener("pointerdown", (event) => {
      const tip = event.target.closest(".tip");
      if (tip) show(tip, event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    if (!tips.length) continue;
    let current = -1;
    const readout = svg.parentElement.querySelector(".visually-hidden");
    const leave = () => { tips[current]?.classList.remove("on"); readout.textContent = ""; hide(); };
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      leave();
      current = (current + step + tips.length) % tips.length;
      tips[current].classList.add("on");
      readout.textContent = tips[current].dataset.tip;
      const box = tips[current].getBoundingClientRect();
      show(tips[current], box.right, box.top);
    });
    svg.addEventListener("blur", leave);
  }
  addEventListener("scroll", hide, { passive: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // Tables: click a heading to sort, once more to turn it round; type to filter.
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const [x, y] = [Number(a), Number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
  };
  for (const holder of document.querySelectorAll(".table")) {
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
  }

  // The slider over the precomputed values of each gamma.
  for (const slider of document.querySelectorAll(".slider")) {
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
  }
})();
