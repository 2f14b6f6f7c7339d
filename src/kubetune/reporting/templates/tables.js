"use strict";
document.querySelectorAll("[data-sortable]").forEach((table) => {
  const heads = [...table.tHead.rows[0].cells];
  const order = (row, column) => (row.cells[column].dataset.order === undefined ? null : Number(row.cells[column].dataset.order));
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows];
    // What has no number stays last, whichever way it is sorted.
    rows.sort((a, b) => {
      const [x, y] = [order(a, column), order(b, column)];
      return x === null || y === null ? (x === null) - (y === null) : sign * (x - y);
    });
    table.tBodies[0].append(...rows);
  }));
});
