"use strict";
// Sorts tables by column, and filters the examples under "Regressions".

const sortKey = (cell) => {
  const number = cell.dataset.sort;
  if (number === undefined) return cell.textContent.trim().toLowerCase();
  return number === "" ? -Infinity : Number(number);
};

const sortBy = (header) => {
  const body = header.closest("table").tBodies[0];
  const column = [...header.parentNode.children].indexOf(header);
  const current = header.getAttribute("aria-sort");
  const first = body.rows[0];
  const numeric = first && first.cells[column].dataset.sort !== undefined;
  const descending = numeric ? current !== "descending" : current === "ascending";
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const rows = [...body.rows].map((row) => [sortKey(row.cells[column]), row]);
  rows.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (descending ? -1 : 1));
  for (const [, row] of rows) body.append(row);
};

for (const header of document.querySelectorAll("table.sortable thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...header.childNodes);
  header.append(button);
  button.addEventListener("click", () => sortBy(header));
}

for (const tools of document.querySelectorAll(".tools")) {
  const examples = [...tools.parentNode.querySelectorAll("details.example")];
  const texts = examples.map((example) => example.textContent.toLowerCase());
  const search = tools.querySelector("input[type=search]");
  const select = tools.querySelector("select");
  const count = tools.querySelector("output");
  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    examples.forEach((example, index) => {
      const inGroup = !select.value || example.dataset.group === select.value;
      const matches = inGroup && words.every((word) => texts[index].includes(word));
      example.hidden = !matches;
      shown += matches;
    });
    count.textContent = `${shown} of ${examples.length} shown`;
  };
  search.addEventListener("input", apply);
  select.addEventListener("change", apply);
  tools.hidden = false;
  apply();
}
