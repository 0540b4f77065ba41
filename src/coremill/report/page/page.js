"use strict";
(() => {
  // Values under the pointer: all charts of a group have the same axis, and show the same place.
  const parsed = new WeakMap();
  const curvesOf = (plot) => {
    if (!parsed.has(plot)) parsed.set(plot, JSON.parse(plot.dataset.readout));
    return parsed.get(plot);
  };
  const nearest = (places, at) => {
    let low = 0, high = places.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (places[middle] < at) low = middle; else high = middle;
    }
    return Math.abs(places[low] - at) <= Math.abs(places[high] - at) ? low : high;
  };
  const add = (parent, name, text) => {
    const node = document.createElement("i");
    node.className = name;
    if (text !== undefined) node.textContent = text;
    return parent.appendChild(node);
  };
  const clear = (plot) => { for (const node of plot.querySelectorAll(".cursor, .cursor-dot, .readout")) node.remove(); };

  const read = (plot, at, withNotes) => {
    clear(plot);
    const curves = curvesOf(plot).filter((curve) => curve.x.length);
    if (!curves.length || !plot.clientWidth) return;
    const found = curves.map((curve) => {
      const index = nearest(curve.x, at);
      return {curve, index, place: curve.x[index]};
    });
    const closest = found.reduce((best, one) => Math.abs(one.place - at) < Math.abs(best.place - at) ? one : best);
    const place = closest.place;
    // Runs of different lengths: one that ended before the pointer says nothing there.
    const near = found.filter((one) => Math.abs(one.place - place) < 3);
    const label = document.createElement("i");
    label.className = "readout";
    add(label, "at", closest.curve.at[closest.index]);
    for (const {curve, index} of near) {
      const row = add(label, "row");
      if (curves.length > 1) add(row, "swatch curve-" + curve.color);
      if (curves.length > 1 && withNotes) add(row, "name", curve.name); // elsewhere the colour says it, in less room
      add(row, "value", curve.text[index]);
      const dot = add(plot, "cursor-dot curve-" + curve.color);
      dot.style.left = curve.x[index] + "%";
      dot.style.top = curve.y[index] + "%";
    }
    const reach = Math.max(0.6, 500 / plot.clientWidth);
    for (const node of plot.querySelectorAll(".mark, .dot")) {
      if (withNotes && Math.abs(parseFloat(node.style.left) - place) <= reach) add(label, "row note", node.dataset.text);
    }
    const line = add(plot, "cursor");
    line.style.left = place + "%";
    label.style.left = place + "%";
    plot.appendChild(label);
    // To the right of the pointer, to its left where the window ends, and inside the window at any rate.
    if (label.getBoundingClientRect().right > document.documentElement.clientWidth - 8) label.classList.add("flip");
    const hidden = 8 - label.getBoundingClientRect().left;
    if (hidden > 0) label.style.marginLeft = hidden - 10 + "px";
  };

  let shown = null; // the group and place the pointer is at, and in which of the plots
  const show = (group, at, number) => {
    shown = {group, at, number};
    document.querySelectorAll(".plot").forEach((plot, index) => {
      if (plot.dataset.group === group) read(plot, at, index === number); else clear(plot);
    });
  };
  const numberOf = (plot) => [...document.querySelectorAll(".plot")].indexOf(plot);
  const hide = () => {
    shown = null;
    document.querySelectorAll(".plot").forEach(clear);
  };
  document.addEventListener("pointermove", (event) => {
    const plot = event.target instanceof Element ? event.target.closest(".plot") : null;
    if (!plot) { if (shown && !document.activeElement?.matches(".plot")) hide(); return; }
    const box = plot.getBoundingClientRect();
    show(plot.dataset.group, 100 * (event.clientX - box.left) / box.width, numberOf(plot));
  });
  window.addEventListener("resize", () => { if (shown) show(shown.group, shown.at, shown.number); });
  document.addEventListener("keydown", (event) => {
    const plot = event.target instanceof Element ? event.target.closest(".plot") : null;
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!plot) return;
    if (event.key === "Escape") hide();
    if (!move) return;
    event.preventDefault();
    const places = curvesOf(plot).flatMap((curve) => curve.x).sort((one, other) => one - other);
    const at = shown ? nearest(places, shown.at) : move > 0 ? -1 : places.length;
    show(plot.dataset.group, places[Math.min(places.length - 1, Math.max(0, at + move))], numberOf(plot));
  });
  document.addEventListener("focusout", (event) => { if (event.target instanceof Element && event.target.matches(".plot")) hide(); });

  // One of several panels: without this script all are shown, one after the other.
  for (const choice of document.querySelectorAll("[data-switch]")) {
    choice.hidden = false;
    const apply = () => {
      const wanted = choice.querySelector("input:checked").value;
      for (const panel of document.querySelectorAll("[data-panel]")) panel.hidden = panel.dataset.panel !== wanted;
      hide();
    };
    choice.addEventListener("change", apply);
    apply();
  }

  // A live page: the server sends the parts that changed.
  const main = document.querySelector("main[data-live]");
  if (!main) return;
  const pill = document.getElementById("live");
  const say = (state, text) => { pill.hidden = false; pill.className = "live " + state; pill.textContent = text; };
  const stream = new EventSource("events?since=" + encodeURIComponent(main.dataset.live));
  stream.addEventListener("open", () => say("on", "live"));
  stream.addEventListener("error", () => say("off", "no answer, trying again"));
  stream.addEventListener("parts", (event) => {
    for (const [name, text] of Object.entries(JSON.parse(event.data))) {
      if (name === "title") { document.title = text; continue; }
      const place = document.querySelector(`[data-part="${name}"]`);
      if (place) place.innerHTML = text;
    }
    if (shown) show(shown.group, shown.at, shown.number);
  });
  stream.addEventListener("end", () => { stream.close(); say("off", "no longer live"); });
})();
