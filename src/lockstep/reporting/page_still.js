document.querySelectorAll("script[data-for]").forEach((element) => {
  add(document.getElementById(element.dataset.for), JSON.parse(element.textContent));
});
list();
