// Sortable tables, and every fold open on paper. The page reads the same without it.
(function () {
  "use strict";

  function valueOf(row, column) {
    var cell = row.cells[column];
    if (!cell) return null;
    var text = cell.dataset.value !== undefined ? cell.dataset.value : cell.textContent.trim();
    if (text === "" || text === "–") return null;
    var number = Number(text);
    return Number.isNaN(number) ? text.toLowerCase() : number;
  }

  // Missing values stay at the end, whichever way the rest is sorted.
  function compare(a, b, direction) {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a === "number" && typeof b === "number") return direction * (a - b);
    return direction * String(a).localeCompare(String(b));
  }

  function sort(table, header, column) {
    var descending = header.getAttribute("aria-sort") !== "descending";
    var direction = descending ? -1 : 1;
    var body = table.tBodies[0];
    var rows = Array.prototype.slice.call(body.rows);
    rows.sort(function (a, b) { return compare(valueOf(a, column), valueOf(b, column), direction); });
    rows.forEach(function (row) { body.appendChild(row); });
    table.querySelectorAll("thead th").forEach(function (other) { other.removeAttribute("aria-sort"); });
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  }

  document.querySelectorAll("table[data-sortable]").forEach(function (table) {
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (header, column) {
      // Not a <button>: Chromium leaves those out of table heads that it repeats on paper.
      var button = document.createElement("span");
      button.className = "sort";
      button.tabIndex = 0;
      button.setAttribute("role", "button");
      while (header.firstChild) button.appendChild(header.firstChild);
      header.appendChild(button);
      button.addEventListener("click", function () { sort(table, header, column); });
      button.addEventListener("keydown", function (event) {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        sort(table, header, column);
      });
    });
  });

  var opened = [];
  window.addEventListener("beforeprint", function () {
    opened = Array.prototype.slice.call(document.querySelectorAll("details:not([open])"));
    opened.forEach(function (fold) { fold.open = true; });
  });
  window.addEventListener("afterprint", function () {
    opened.forEach(function (fold) { fold.open = false; });
  });
})();
