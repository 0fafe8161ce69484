"use strict";
// Sorts tables by a click on a column's name, and filters the documents under "Where it breaks". Loads nothing.

const valueOf = (cell) => {
  const stated = cell.dataset.sort;
  if (stated === undefined) return cell.textContent.trim().toLowerCase();
  return stated === "" ? -Infinity : Number(stated);
};

const sortBy = (header) => {
  const table = header.closest("table");
  const column = [...header.parentNode.children].indexOf(header);
  const down = header.getAttribute("aria-sort") !== "descending";
  const first = table.tBodies[0].rows[0];
  const numeric = first && first.cells[column].dataset.sort !== undefined;
  const descending = numeric ? down : header.getAttribute("aria-sort") === "ascending";
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].map((row) => [valueOf(row.cells[column]), row]);
  rows.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (descending ? -1 : 1));
  for (const [, row] of rows) table.tBodies[0].append(row);
};

for (const header of document.querySelectorAll("table.sortable thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...header.childNodes);
  header.append(button);
  button.addEventListener("click", () => sortBy(header));
}

for (const tools of document.querySelectorAll(".tools")) {
  const breaks = [...tools.parentNode.querySelectorAll("details.break")];
  const texts = breaks.map((one) => one.textContent.toLowerCase());
  const search = tools.querySelector("input[type=search]");
  const select = tools.querySelector("select");
  const count = tools.querySelector("output");
  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    breaks.forEach((one, place) => {
      const fits = (!select.value || one.dataset.of === select.value) && words.every((word) => texts[place].includes(word));
      one.hidden = !fits;
      shown += fits;
    });
    count.textContent = `${shown} of ${breaks.length} shown`;
  };
  search.addEventListener("input", apply);
  select.addEventListener("change", apply);
  tools.hidden = false;
  apply();
}
