"use strict";
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// Filters: a cell stays if it has every chosen value, a row if one of its cells stays and it has the word, a column if
// one of its cells stays.
const form = document.querySelector("form.filters");
const fields = form ? all("[data-filter]", form) : [];
const rows = all("tr[data-clause]");
const tests = Object.fromEntries(all("[data-tests]").map((each) => [each.dataset.tests, each]));
const folded = Object.fromEntries(all("[data-tests-of]").map((each) => [each.dataset.testsOf, each]));

function apply() {
  const wanted = Object.fromEntries(fields.map((field) => [field.dataset.filter, field.value.trim().toLowerCase()]));
  const has = (data, keys) => keys.every((key) => !wanted[key] || data[key].toLowerCase() === wanted[key]);
  let shown = 0;
  for (const area of all("section[data-area]")) {
    const inArea = has(area.dataset, ["area"]);
    const columns = all("thead th", area);
    const alive = columns.map((_, index) => index === 0);
    for (const row of all("tr[data-clause]", area)) {
      const text = `${row.dataset.clause} ${row.textContent}`.toLowerCase();
      const kept = [...row.cells].map((cell, index) => {
        const outcome = cell.querySelector("[data-outcome]");
        if (index === 0 || !outcome) return false;
        const fits = has(columns[index].dataset, ["device", "dtype", "world"]) && has(outcome.dataset, ["outcome"]);
        outcome.classList.toggle("off", !fits);
        return fits;
      });
      row.hidden = !(inArea && text.includes(wanted.word) && kept.includes(true));
      tests[row.dataset.clause].hidden = row.hidden;
      if (!row.hidden) kept.forEach((stays, index) => { alive[index] ||= stays; });
      shown += !row.hidden;
    }
    for (const row of all("tr", area)) [...row.cells].forEach((cell, index) => { cell.hidden = !alive[index]; });
    area.hidden = !all("tr[data-clause]", area).some((row) => !row.hidden);
    folded[area.dataset.area].hidden = area.hidden;
  }
  const none = shown || !rows.length ? "" : ": none has all that is asked for";
  document.getElementById("shown").textContent = `${shown} of ${rows.length} clauses${none}`;
}

if (form) {
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));
}

// A link unfolds the elements around its target, and moves the focus to it.
function show() {
  const target = document.querySelector(":target");
  if (!target) return;
  if (form && target.closest("[hidden]")) form.reset(), apply();
  for (let each = target; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
  target.scrollIntoView();
  (target.tagName === "DETAILS" ? target.firstElementChild : target).focus({ preventScroll: true });
}
window.addEventListener("hashchange", show);

// A word keeps the rows that have it.
for (const field of all("[data-search]")) {
  const rows = all(field.dataset.search);
  field.closest(".filters").hidden = false;
  field.addEventListener("input", () => {
    const word = field.value.trim().toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(word);
  });
}

for (const code of all(".command code")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "copy";
  button.setAttribute("aria-label", `Copy: ${code.textContent.slice(0, 80)}`);
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch {
      button.textContent = document.execCommand("copy") ? "copied" : "press Ctrl-C";
    }
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  });
  code.after(" ", button);
}

for (const button of all("[data-fold]")) {
  const folds = all(button.dataset.fold);
  button.hidden = folds.length < 2;
  button.addEventListener("click", () => {
    const open = folds.some((each) => !each.open);
    for (const each of folds) each.open = open;
  });
}

if (form) apply();
show();
