"use strict";
// Tables that are sorted by a click on a heading. A page that is live keeps the order when its parts are put in anew.
(() => {
  const orders = new Map(); // by the name of a table: its column, and 1 or -1
  const keyOf = (row, column) => row.cells[column].dataset.order;
  const compare = (a, b) => {
    const difference = Number(a) - Number(b);
    return Number.isNaN(difference) ? a.localeCompare(b) : difference;
  };
  const sort = (table, column, sign) => {
    [...table.tHead.rows[0].cells].forEach((head, i) => {
      if (i === column) head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    const rows = [...table.tBodies[0].rows];
    // What has no value stays last, whichever way it is sorted.
    rows.sort((a, b) => {
      const [x, y] = [keyOf(a, column), keyOf(b, column)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      return sign * compare(x, y);
    });
    table.tBodies[0].append(...rows);
  };
  document.addEventListener("click", (event) => {
    const head = event.target.closest("[data-sortable] thead th");
    if (!head || !event.target.closest("button")) return;
    const table = head.closest("table");
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    orders.set(table.dataset.sortable, [head.cellIndex, sign]);
    sort(table, head.cellIndex, sign);
  });
  document.addEventListener("renewed", () => document.querySelectorAll("[data-sortable]").forEach((table) => {
    const order = orders.get(table.dataset.sortable);
    if (order) sort(table, ...order);
  }));
})();
