// The colours of text and lines follow the page's, and how curves are drawn the switches. `uirevision` keeps what a person
// did to a chart, such as a zoom, when it is drawn again; that of an axis changes with what it shows.
"use strict";
const figures = new Map();
const read = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shade = (style) => style?.color ? {...style, color: read(`--${style.color.slice(1)}`) || style.color} : style;
// The mean of the values until there, each later one counting more: 1 - weight and weight of what is before it, without
// the zero that such a mean begins with.
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
  const {data, layout, axes} = figures.get(place);
  const axis = document.querySelector("input[name=axis]:checked")?.value;
  const chosen = axes.includes(axis);
  const weight = chosen ? Number(document.getElementById("smoothing").value) : 0;
  const lines = {gridcolor: read("--line"), zerolinecolor: read("--line")};
  const x = chosen ? {title: {text: axis}, uirevision: axis} : {};
  const isLog = chosen && !layout.yaxis.tickformat && document.getElementById("logarithmic").checked
    && data.some((trace) => trace.y.some(positive));
  const y = isLog ? {type: "log", uirevision: "log"} : {};
  const traces = data.map((trace) => {
    const {line, marker} = trace;
    const colours = {...line && {line: shade(line)}, ...marker && {marker: shade(marker)}};
    return {...trace, ...colours, ...chosen && {x: trace.meta[axis]}, ...isLog && {y: trace.y.map(positive)}};
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
