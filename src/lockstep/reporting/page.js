// The colours of text and lines follow the page's, and what is shown the switch. `uirevision` keeps what a person did to
// a chart, such as a zoom, when it is drawn again; that of the x axis changes with what it shows.
"use strict";
const figures = new Map();
const read = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const draw = (place) => {
  const {data, layout, axes} = figures.get(place);
  const axis = document.querySelector("input[name=axis]:checked")?.value;
  const chosen = axes.includes(axis);
  const lines = {gridcolor: read("--line"), zerolinecolor: read("--line")};
  const x = chosen ? {title: {text: axis}, uirevision: axis} : {};
  Plotly.react(place, data.map((trace) => chosen ? {...trace, x: trace.meta[axis]} : {...trace}), {
    ...layout, uirevision: "kept", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {...layout.font, color: read("--text")},
    xaxis: {...layout.xaxis, ...lines, ...x}, yaxis: {...layout.yaxis, ...lines},
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
document.getElementById("axis")?.addEventListener("change", drawAll);
