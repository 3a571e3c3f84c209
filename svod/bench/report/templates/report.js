// Sorting by the header buttons, and all details open in print. The page is complete without this.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const numeric = head.classList.contains("num");
      const order = head.getAttribute("aria-sort");
      const down = order ? order === "ascending" : numeric;
      heads.forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
      const compare = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        return (down ? -1 : 1) * (numeric ? x - y : x.localeCompare(y, undefined, { numeric: true }));
      };
      body.append(...[...body.rows].sort(compare));
    });
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
