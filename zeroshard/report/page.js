// Hovering, zooming and choosing. The page is complete without it; it computes no number that is shown.
"use strict";
(() => {
  document.documentElement.classList.add("js");
  const tip = document.getElementById("tip");
  const number = (text) => Number(text).toLocaleString("en-US");
  const range = (pair) => { const [a, b] = pair.split(","); return `[${number(a)}, ${number(b)})`; };
  const ends = (pair) => pair.split(",").map(Number);

  function show(text, event) {
    if (tip.textContent !== text) tip.textContent = text;
    tip.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = tip;
    const left = event.clientX + 14 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 14;
    const top = event.clientY + 16 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 16;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  }
  const hide = () => { tip.hidden = true; };

  // Buffer maps: what a cell is, and its row in the table.
  function describe(cell) {
    const { slot, world, local, param } = cell.dataset;
    const of = cell.parentNode.dataset;
    const slots = JSON.parse(cell.closest("svg").dataset.slots);
    const [from, to] = ends(world);
    const bytes = of.itemsize ? `, ${number((to - from) * of.itemsize)} bytes` : "";
    const lines = [slot === undefined ? "padding" : `${slots[slot][0]}  (${slots[slot][1].join(" x ") || "one value"})`];
    if (of.rank !== undefined) lines.push(`${of.tensor} on rank ${of.rank}`);
    lines.push(`world ${range(world)}`);
    if (of.rank !== undefined) lines.push(`local ${range(local)}`);
    if (param) lines.push(`param ${range(param)}`);
    lines.push(`${number(to - from)} elements${bytes}`);
    return lines.join("\n");
  }
  function light(cell) {
    document.querySelectorAll("tr.lit").forEach((row) => row.classList.remove("lit"));
    const rank = cell?.parentNode.dataset.rank;
    if (rank === undefined) return;
    const text = range(cell.dataset.world);
    for (const row of cell.closest("figure").querySelectorAll(".ranges tbody tr"))
      if (row.cells[0].textContent === rank && row.cells[2].textContent === text) row.classList.add("lit");
  }
  for (const map of document.querySelectorAll("svg.map")) {
    map.addEventListener("pointermove", (event) => {
      const cell = event.target.closest(".cell");
      if (cell) { show(describe(cell), event); light(cell); } else hide();
    });
    map.addEventListener("pointerleave", () => { hide(); light(null); });
  }

  // Zoom: the same linear scale on a part of the elements.
  function zoom(figure, start, stop) {
    const all = Number(figure.querySelector("svg.map").dataset.numel);
    const least = Math.min(all, 8);
    const length = Math.max(least, Math.min(all, Math.round(stop - start)));
    start = Math.max(0, Math.min(all - length, Math.round(start)));
    stop = start + length;
    figure.window = [start, stop];
    figure.querySelector(".zoom output").textContent = `elements ${range(`${start},${stop}`)} of ${number(all)}`;
    for (const svg of figure.querySelectorAll("svg.map")) {
      const left = Number(svg.dataset.left), right = Number(svg.dataset.right);
      const place = (at) => left + (right - left) * (at - start) / length;
      for (const shape of svg.querySelectorAll("rect.cell")) {
        const [from, to] = ends(shape.dataset.world);
        const a = Math.max(left, place(from)), b = Math.min(right, place(to));
        shape.setAttribute("x", a);
        shape.setAttribute("width", Math.max(0, b - a));
      }
      for (const words of svg.querySelectorAll("text[data-world]")) {
        const [from, to] = ends(words.dataset.world);
        const a = Math.max(left, place(from)), b = Math.min(right, place(to));
        words.setAttribute("x", (a + b) / 2);
        words.setAttribute("opacity", b - a >= Number(words.dataset.room) ? 1 : 0);
      }
      for (const border of svg.querySelectorAll("line[data-at]")) {
        const x = place(Number(border.dataset.at));
        border.setAttribute("x1", x);
        border.setAttribute("x2", x);
        border.setAttribute("opacity", x >= left - 0.5 && x <= right + 0.5 ? 1 : 0);
      }
    }
  }
  for (const figure of document.querySelectorAll("figure")) {
    const map = figure.querySelector("svg.map");
    if (!map) continue;
    const all = Number(map.dataset.numel);
    figure.window = ends(map.dataset.window);
    const steps = {
      in: ([a, b]) => [a + (b - a) / 4, b - (b - a) / 4],
      out: ([a, b]) => [a - (b - a) / 2, b + (b - a) / 2],
      left: ([a, b]) => [a - (b - a) / 3, b - (b - a) / 3],
      right: ([a, b]) => [a + (b - a) / 3, b + (b - a) / 3],
      all: () => [0, all],
    };
    for (const button of figure.querySelectorAll("[data-zoom]"))
      button.addEventListener("click", () => zoom(figure, ...steps[button.dataset.zoom](figure.window)));
    const goTo = (pair) => { const [a, b] = ends(pair); const more = Math.max(4, (b - a) * 0.06); zoom(figure, a - more, b + more); };
    for (const button of figure.querySelectorAll("[data-goto]")) button.addEventListener("click", () => goTo(button.dataset.goto));
    for (const cell of figure.querySelectorAll(".strip .cell")) cell.addEventListener("click", () => goTo(cell.dataset.world));
  }

  // Charts: what was written for the nearest point, or for the column.
  for (const chart of document.querySelectorAll("svg.chart")) {
    const script = chart.closest("figure").querySelector('script[type="application/json"]');
    if (!script) continue;
    const found = JSON.parse(script.textContent);
    const left = Number(chart.dataset.left), right = Number(chart.dataset.right);
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor");
    const nearest = (share) => {
      if (found.edges) return Math.max(0, Math.min(found.says.length - 1, found.edges.findIndex((edge) => edge > share) - 1));
      let best = 0;
      found.at.forEach((at, index) => { if (Math.abs(at - share) < Math.abs(found.at[best] - share)) best = index; });
      return best;
    };
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect(), view = chart.viewBox.baseVal;
      const share = ((event.clientX - box.left) / box.width * view.width - left) / (right - left);
      if (share < -0.02 || share > 1.02) { hide(); cursor.remove(); return; }
      const index = nearest(Math.max(0, Math.min(0.99999, share)));
      const at = found.edges ? (found.edges[index] + found.edges[index + 1]) / 2 : found.at[index];
      for (const [name, value] of [["x1", left + at * (right - left)], ["x2", left + at * (right - left)], ["y1", 10], ["y2", view.height - 24]])
        cursor.setAttribute(name, value);
      chart.append(cursor);
      show(found.says[index], event);
    });
    chart.addEventListener("pointerleave", () => { hide(); cursor.remove(); });
  }

  // Choices: one content at a time.
  for (const chooser of document.querySelectorAll(".chooser")) {
    const select = chooser.querySelector("select");
    const contents = [...chooser.children].filter((child) => child.classList.contains("choice"));
    const update = () => contents.forEach((content, index) => { content.hidden = index !== Number(select.value); });
    select.addEventListener("change", update);
    update();
  }
  addEventListener("scroll", hide, { passive: true });
})();
