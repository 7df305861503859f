// Draws charts with the text and line colors of the page, and with the settings of the switches above the charts.
// `uirevision` preserves changes by the reader, such as a zoom, when the chart is redrawn. The `uirevision` of an axis
// changes with its unit, which resets the axis.
"use strict";
const figures = new Map();
const unticked = new Set();
const read = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shade = (style) => style?.color ? {...style, color: read(`--${style.color.slice(1)}`) || style.color} : style;
const keyOf = (group, name) => JSON.stringify([group, name]);
const isTicked = (group, {name, part}) =>
  !unticked.has(keyOf(group, name)) && !(part && unticked.has(keyOf("", part)));
// Smooth values with an exponential moving average, corrected for its initial bias towards zero.
const smooth = (values, weight) => {
  let mean = 0, sum = 0;
  return values.map((value) => {
    if (value === null) return null;
    [mean, sum] = [weight * mean + (1 - weight) * value, weight * sum + 1 - weight];
    return mean / sum;
  });
};
const faint = (trace) => ({
  ...trace, opacity: 0.25, mode: "lines", showlegend: false, hoverinfo: "skip", legendgroup: trace.name,
});
const positive = (value) => value > 0 ? value : null;
const draw = (place) => {
  const {data, layout, axes, legend} = figures.get(place);
  const axis = document.querySelector("input[name=axis]:checked")?.value;
  const chosen = axes.includes(axis);
  const weight = chosen ? Number(document.getElementById("smoothing").value) : 0;
  const lines = {gridcolor: read("--line"), zerolinecolor: read("--line")};
  const x = chosen ? {title: {text: axis}, uirevision: axis} : {};
  const isLog = chosen && !layout.yaxis.tickformat && document.getElementById("logarithmic").checked
    && data.some((trace) => trace.y.some(positive));
  const isClose = chosen && !document.getElementById("zero").checked;
  const y = {...isClose && {rangemode: "normal"}, ...isLog && {type: "log", uirevision: "log"}};
  const traces = data.map((trace) => {
    const {line, marker, meta} = trace;
    const colors = {...line && {line: shade(line)}, ...marker && {marker: shade(marker)}};
    const ticked = legend ? {visible: isTicked(legend, meta)} : {};
    return {...trace, ...colors, ...ticked, ...chosen && {x: meta[axis]}, ...isLog && {y: trace.y.map(positive)}};
  });
  const noisy = weight ? traces.filter((trace) => trace.meta.noisy) : [];
  const shown = traces.map((trace) => noisy.includes(trace)
    ? {...trace, y: smooth(trace.y, weight), legendgroup: trace.name} : trace);
  Plotly.react(place, [...shown, ...noisy.map(faint)], {
    ...layout, uirevision: "kept", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {...layout.font, color: read("--text")},
    xaxis: {...layout.xaxis, ...lines, ...x}, yaxis: {...layout.yaxis, ...lines, ...y},
  }, {displayModeBar: false});
};
const resized = new ResizeObserver((entries) => entries.forEach(({target}) => Plotly.Plots.resize(target)));
const add = (place, figure) => {
  const isNew = !figures.has(place);
  figures.set(place, figure);
  draw(place);
  if (isNew) resized.observe(place);
};
const drawAll = () => [...figures.keys()].forEach(draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
document.getElementById("switches")?.addEventListener("input", drawAll);

// Build the page legend, which has a checkbox for each name in a group of charts, and one each for training and
// validation.
const strokes = {solid: "", dash: "7 4", dot: "2 3", dashdot: "8 3 2 3"};
const element = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};
const sample = ({color, dash, width}) => {
  const [svg, line] = ["svg", "line"].map((name) => document.createElementNS("http://www.w3.org/2000/svg", name));
  Object.entries({width: 26, height: 8, "aria-hidden": true}).forEach((each) => svg.setAttribute(...each));
  const drawn = {x2: 26, y1: 4, y2: 4, "stroke-width": width ?? 2.5, "stroke-dasharray": strokes[dash] ?? ""};
  Object.entries(drawn).forEach((each) => line.setAttribute(...each));
  line.style.stroke = color ? `var(--${color.slice(1)}, ${color})` : "currentColor";
  svg.append(line);
  return svg;
};
const tickBox = (group, name, text, style, changed) => {
  const key = keyOf(group, name);
  const box = element("input", {type: "checkbox", checked: !unticked.has(key)});
  box.addEventListener("input", () => { box.checked ? unticked.delete(key) : unticked.add(key); changed(); });
  return element("label", {}, box, sample(style), text);
};
const listed = (group, names, isOpen) => {
  const summary = element("summary");
  const count = () => {
    const ticked = names.filter(({name}) => !unticked.has(keyOf(group, name))).length;
    summary.textContent = ticked === names.length ? `${ticked} ${group}` : `${ticked} of ${names.length} ${group}`;
  };
  const labels = names.map(({name, style}) => tickBox(group, name, name, style, count));
  const button = (text, isTicked) => {
    const made = element("button", {type: "button", textContent: text});
    made.addEventListener("click", () => {
      names.forEach(({name}) => unticked[isTicked ? "delete" : "add"](keyOf(group, name)));
      labels.forEach((label) => { label.querySelector("input").checked = isTicked; });
      count();
      drawAll();
    });
    return made;
  };
  const keys = element("div", {className: "keys"}, button("all", true), button("none", false), ...labels);
  count();
  return element("details", {className: "names", open: isOpen}, summary, keys);
};
let written = "";
const list = () => {
  const place = document.getElementById("legend");
  if (!place) return;
  const groups = new Map(), parts = new Set();
  [...figures.values()].filter(({legend}) => legend).forEach(({data, legend}) => data.forEach(({line, meta}) => {
    if (!groups.has(legend)) groups.set(legend, new Map());
    groups.get(legend).set(meta.name, {...meta, line});
    if (meta.part) parts.add(meta.part);
  }));
  const names = [...groups].map(([group, found]) => [group, [...found.values()]
    .sort((one, other) => one.place - other.place)
    .map(({name, line: {color, dash}}) => ({name, style: {color, dash}}))]).filter(([, found]) => found.length > 1);
  document.getElementById("of-curves").hidden = ![...figures.values()].some(({axes}) => axes.length);
  const text = JSON.stringify([names, [...parts]]);
  if (text === written) return;
  written = text;
  const open = [...place.querySelectorAll("details")].map((each) => each.open);
  // Collapse long lists, which would hide the charts on a phone.
  place.replaceChildren(...names.map(([group, found], number) =>
    listed(group, found, open[number] ?? (found.length <= 4 || innerWidth >= 1000))));
  document.getElementById("parts").replaceChildren(...parts.size < 2 ? [] : [...parts].sort().map((part) =>
    tickBox("", part, part, {width: part === "training" ? 1 : 2.5}, () => {})));
};
