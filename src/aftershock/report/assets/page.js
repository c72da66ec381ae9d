// Tables that sort by the column that is clicked.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, i) => {
    const numeric = table.tBodies[0].rows[0].cells[i].className === "number";
    head.classList.toggle("number", numeric);
    head.addEventListener("click", () => {
      const first = numeric ? "descending" : "ascending", other = numeric ? "ascending" : "descending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      const sign = order === "ascending" ? 1 : -1, value = (row) => row.cells[i].dataset.value;
      const compare = numeric ? (a, b) => a - b : (a, b) => a.localeCompare(b, undefined, {numeric: true});
      const rows = [...table.tBodies[0].rows].sort((a, b) => sign * compare(value(a), value(b)));
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      table.tBodies[0].append(...rows);
    });
  });
}

// A link to something folded up opens it.
const unfold = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target || target.tagName !== "DETAILS") return;
  for (let outer = target; outer; outer = outer.parentElement.closest("details")) outer.open = true;
  target.scrollIntoView();
  target.querySelector("summary").focus({preventScroll: true});
};
const show = (id) => location.hash === `#${id}` ? unfold() : (location.hash = id);
window.addEventListener("hashchange", unfold);
unfold();

// The plotting library: beside the page, or packed inside it.
const loadLibrary = async () => {
  const packed = document.getElementById("library");
  if (!packed) return;
  const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
  const script = document.createElement("script");
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
};

const dark = matchMedia("(prefers-color-scheme: dark)"), narrow = matchMedia("(max-width: 600px)");
const PAPER = 680;  // pixels across a printed sheet

// A colour with its hue and its lightness turned over; white becomes the dark page's own grey.
const mirrored = (colour) => {
  const parts = colour[0] === "#" ? colour.match(/[0-9a-f]{2}/gi).map((two) => parseInt(two, 16))
    : colour.match(/[\d.]+/g).map(Number);
  const rgb = parts.slice(0, 3), turn = 255 - Math.max(...rgb) - Math.min(...rgb);
  return `rgba(${rgb.map((value) => Math.round(26 + 0.9 * (value + turn)))}, ${parts[3] ?? 1})`;
};
const darkened = (part, key = "") => {
  if (Array.isArray(part)) return part.map((one) => darkened(one, key));
  if (part && typeof part === "object") {
    return Object.fromEntries(Object.entries(part).map(([name, value]) => [name, darkened(value, name)]));
  }
  return typeof part === "string" && /color$/i.test(key) && /^(#|rgb)/.test(part) ? mirrored(part) : part;
};

// Words on lines that a small screen holds.
const folded = (text) => text.replace(/([^<>]{28,}?) (?=\S{2})/g, "$1<br>");
const linesOf = (text) => folded(text).split("<br>").length;
// Panels to the right of others stand below them on a small screen.
const stacked = (layout) => {
  const columns = Object.keys(layout).filter((key) => /^xaxis/.test(key));
  const right = columns.filter((key) => layout[key].domain?.[0] > 0.5);
  if (!right.length) return layout;
  const shape = {...layout, height: 1.6 * layout.height};
  const above = (y) => 0.54 + 0.46 * y, below = (y) => 0.02 + 0.41 * y;
  for (const key of columns) {
    const upright = key.replace("x", "y");
    shape[key] = {...layout[key], domain: [0, 1]};
    shape[upright] = {...layout[upright], domain: layout[upright].domain.map(right.includes(key) ? below : above)};
  }
  shape.annotations = layout.annotations?.map((note) => ({...note, x: 0.5, y: (note.x > 0.5 ? below : above)(note.y)}));
  return shape;
};
// On a small screen there is one key, and it stands under the figure.
const narrowed = ({data, layout: wide}) => {
  const layout = stacked(wide);
  const named = data.filter((trace) => trace.name && trace.showlegend !== false && layout.showlegend !== false);
  const keyed = named.reduce((sum, trace) => sum + linesOf(trace.name), 0);
  const notes = Math.max(0, ...(layout.annotations ?? []).map((note) => linesOf(note.text) - 1));
  const shape = {...layout, height: layout.height + 20 * (keyed + notes), font: {...layout.font, size: 12}};
  shape.dragmode = false;  // a finger scrolls the page
  shape.margin = {...layout.margin, l: 50, r: 8, t: layout.margin.t + 16 * notes};
  const under = {x: 0, y: 0, xanchor: "left", yanchor: "bottom", yref: "container"};
  shape.legend = {traceorder: "normal", orientation: "h", ...under};
  shape.annotations = layout.annotations?.map((note) => ({...note, text: folded(note.text)}));
  for (const axis of Object.keys(layout).filter((key) => /^xaxis/.test(key) && layout[key].title?.text)) {
    shape[axis] = {...layout[axis], title: {...layout[axis].title, text: folded(layout[axis].title.text)}};
  }
  const refolded = (trace) => ({...trace, legend: "legend", name: trace.name && folded(trace.name)});
  return {data: data.map(refolded), layout: shape};
};

const figures = [...document.querySelectorAll(".plot")].map((plot) => {
  return {plot, figure: JSON.parse(plot.nextElementSibling.textContent)};
});
const draw = (paper) => {
  for (const {plot, figure} of figures) {
    const sized = narrow.matches && !paper ? narrowed(figure) : figure;
    const {data, layout} = dark.matches && !paper ? darkened(sized) : sized;
    const clear = {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)"};  // the page shows through
    const width = paper ? {width: PAPER} : {autosize: true};
    const config = {displayModeBar: false, responsive: true};  // dragging zooms, a double click goes back
    Plotly.react(plot, structuredClone(data), {...structuredClone(layout), ...clear, ...width}, config);
    // what was chosen beside a figure is put into it again
    plot.closest(".chooser")?.querySelector("select").dispatchEvent(new Event("change"));
  }
};
const watch = () => {
  for (const medium of [dark, narrow]) medium.addEventListener("change", () => draw());
  // A drawing keeps the width of the screen, which is wider than paper, and its colours, which are for a screen.
  window.addEventListener("beforeprint", () => draw(true));
  window.addEventListener("afterprint", () => draw());
  document.documentElement.dataset.drawn = "yes";
};
