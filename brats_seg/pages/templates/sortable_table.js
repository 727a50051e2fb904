// Sort a table of class `sortable` by the head of a column that is pressed: rising, then falling.
// The cells of that column have their value in `data-value`; empty values come last either way.
for (const button of document.querySelectorAll(".sortable th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
    const place = [...head.parentElement.children].indexOf(head);
    const rising = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const isNumber = (text) => text !== "" && !Number.isNaN(Number(text));
    const rows = [...body.rows].map((row) => [row.cells[place].dataset.value, row]);
    const numbers = rows.every(([text]) => text === "" || isNumber(text));
    const compare = (one, other) =>
      numbers ? Number(one) - Number(other) : one.localeCompare(other, "en", { numeric: true });
    rows.sort(([one], [other]) => {
      if (one === "" || other === "") return (one === "") - (other === "");
      return rising ? compare(one, other) : compare(other, one);
    });
    body.append(...rows.map(([, row]) => row));
  });
}
