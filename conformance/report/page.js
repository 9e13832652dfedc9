"use strict";
// Filters over the clause matrix: a row stays when it holds every word and value that is asked for.
const filters = document.querySelectorAll(".filters [data-filter]");
const rows = document.querySelectorAll("tr[data-clause]");

function apply() {
  const wanted = Object.fromEntries([...filters].map((field) => [field.dataset.filter, field.value.trim().toLowerCase()]));
  let shown = 0;
  for (const row of rows) {
    const has = (key) => !wanted[key] || row.dataset[key].toLowerCase().split("|").includes(wanted[key]);
    const hasWord = !wanted.word || row.textContent.toLowerCase().includes(wanted.word);
    row.hidden = !(hasWord && ["area", "outcome", "device", "dtype", "world"].every(has));
    shown += !row.hidden;
  }
  for (const area of document.querySelectorAll("[data-area-section]")) {
    area.hidden = !area.querySelector("tr[data-clause]:not([hidden])");
  }
  document.getElementById("shown").textContent = `${shown} of ${rows.length} clauses`;
}

for (const field of filters) field.addEventListener("input", apply);

// A cell leads to its clause's tests: open them on arrival.
function openTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) target.open = true;
}
window.addEventListener("hashchange", openTarget);
openTarget();
apply();
