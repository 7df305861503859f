// Only sections whose HTML changed are replaced. A chart isn't replaced, but redrawn with its new figure.
const sections = document.getElementById("sections");
const note = document.getElementById("note");
const switches = document.getElementById("switches");
const shown = new Map();
let tag = "", over = false;
// Replace the HTML of a section. A table that the reader opened stays open, and keeps its scroll position.
const replace = (section, html) => {
  const isOpen = section.querySelector("details")?.open;
  const left = section.querySelector(".wide")?.scrollLeft;
  section.innerHTML = html;
  if (isOpen) section.querySelector("details")?.setAttribute("open", "");
  if (left) section.querySelector(".wide")?.scrollTo(left, 0);
};
const update = ({title, parts}) => {
  document.title = title;
  const keys = new Set(parts.map(({key}) => key));
  [...shown].filter(([key]) => !keys.has(key)).forEach(([key, {section}]) => {
    const place = section.querySelector(".chart");
    if (place) { resized.unobserve(place); figures.delete(place); }
    section.remove();
    shown.delete(key);
  });
  parts.forEach(({key, html, figure}, number) => {
    const known = shown.get(key);
    const section = known?.section ?? document.createElement("section");
    if (!known || (!figure && known.html !== html)) replace(section, html);
    const there = sections.querySelectorAll(":scope > section")[number];
    if (there !== section) sections.insertBefore(section, there ?? null);
    const text = JSON.stringify(figure);
    if (figure && known?.text !== text) add(section.querySelector(".chart"), figure);
    shown.set(key, {section, html, text});
  });
  list();
  const first = sections.querySelector(":scope > :has(> .chart)");
  switches.hidden = !first;
  if (first && first.previousElementSibling !== switches) sections.insertBefore(switches, first);
};
const ask = async () => {
  if (document.hidden) return;
  try {
    const answer = await fetch("data", {headers: {"If-None-Match": tag}, cache: "no-store"});
    if (answer.status === 200) {
      const found = await answer.json();
      tag = answer.headers.get("ETag");
      update(found);
      over = found.over;
      note.textContent = over ? "All watched runs have ended. This page shows their final state." : "";
    } else if (answer.status !== 304) throw new Error();
    else note.textContent = "";
  } catch (error) {
    note.textContent = "lockstep watch does not respond. This page shows the last known state.";
  }
};
const again = async () => { await ask(); if (!over) setTimeout(again, Number(sections.dataset.every)); };
document.addEventListener("visibilitychange", () => over || ask());
again();
