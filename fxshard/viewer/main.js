// What the mouse and the keys do.

const READABLE = 0.75; // the smallest zoom at which a picture begins
const search = document.getElementById("search"), found_list = document.getElementById("found");

function choose(box, options = {}) {
  chosen = box;
  mark();
  show_details();
  if (box && options.show !== false) show(box, options.centred);
}

// a box anywhere: what is around it opens
function find(box) {
  if (!box) return;
  if (reveal(box)) draw();
  choose(box, { centred: true });
}

// the mouse
const box_at = (event) => boxes.get(event.target.closest?.("[data-id]")?.dataset.id);
let drag = null;
canvas.addEventListener("pointerdown", (e) => {
  drag = { x: e.clientX, y: e.clientY, from: { ...camera }, moved: false, box: box_at(e) };
  canvas.setPointerCapture(e.pointerId);
});
canvas.addEventListener("pointermove", (e) => {
  if (!drag) return;
  const dx = e.clientX - drag.x, dy = e.clientY - drag.y;
  drag.moved ||= Math.hypot(dx, dy) > 4;
  if (!drag.moved) return;
  canvas.classList.add("moving");
  move_to({ ...drag.from, x: drag.from.x + dx, y: drag.from.y + dy });
});
let last_click = { box: null, time: 0 };
canvas.addEventListener("pointerup", (e) => {
  canvas.classList.remove("moving");
  const was = drag;
  drag = null;
  if (!was || was.moved) return;
  canvas.focus({ preventScroll: true });
  const twice = was.box && last_click.box === was.box && e.timeStamp - last_click.time < 400;
  last_click = { box: was.box, time: twice ? 0 : e.timeStamp };
  choose(was.box ?? null, { show: false });
  if (twice) act(was.box);
});
canvas.addEventListener("wheel", (e) => {
  e.preventDefault();
  const { left, top } = canvas.getBoundingClientRect();
  zoom_at(Math.exp(-e.deltaY * (e.deltaMode ? 0.05 : 0.0016)), e.clientX - left, e.clientY - top);
}, { passive: false });

// the keys
function act(box) {
  if (!box?.is_call) return;
  toggle(box);
  choose(box);
}

function step(by) {
  const order = seen_in_order(), at = order.indexOf(chosen);
  choose(order[at < 0 ? (by > 0 ? 0 : order.length - 1) : Math.min(order.length - 1, Math.max(0, at + by))]);
}

function inwards() {
  if (!chosen) return step(1);
  if (chosen.is_call && !chosen.open) act(chosen);
  else if (chosen.is_call) choose(chosen.children[0]);
}

function outwards() {
  if (chosen?.is_call && chosen.open) act(chosen);
  else if (chosen?.parent && chosen.parent !== top_box) choose(chosen.parent);
}

function level(change) {
  change();
  if (chosen) chosen = seen(chosen);
  draw();
  fit(READABLE);
  if (chosen) show(chosen);
}

function turn_theme() {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme ?? (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
}

const on_canvas = {
  ArrowDown: () => step(1), ArrowUp: () => step(-1), ArrowRight: inwards, ArrowLeft: outwards, Enter: () => act(chosen), " ": () => act(chosen),
  Home: () => choose(seen_in_order()[0]), End: () => choose(seen_in_order().at(-1)),
};
const anywhere = {
  "/": () => search.select(), Escape: () => choose(null), "+": () => level(unfold), "=": () => level(unfold), "-": () => level(fold),
  0: () => fit(), t: turn_theme, "?": () => document.getElementById("keys").showModal(),
};
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target === search || document.querySelector("dialog[open]")) return;
  const act_on = (document.activeElement === canvas && on_canvas[e.key]) || anywhere[e.key];
  if (!act_on) return;
  e.preventDefault();
  act_on();
});

// the search
let hits = [], hit = 0;
const text_of = (box) => (box.is_call ? box.about.path : [box.about.name, box.about.op, box.about.module, box.about.layout, box.about.reason, box.about.source].join(" ")).toLowerCase();

function look() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const all = words.length ? [...boxes.values()].filter((b) => words.every((w) => text_of(b).includes(w))) : [];
  const rank = (b) => (b.about.name === search.value || b.about.path === search.value ? 0 : b.is_call ? 1 : 2);
  hits = all.sort((a, b) => rank(a) - rank(b)).slice(0, 60);
  hit = 0;
  show_hits();
}

function show_hits() {
  const items = hits.map((box, i) => {
    const about = box.is_call ? `module, ${box.names.length} nodes` : [box.about.op, box.about.module, box.about.source].filter(Boolean).join(" · ");
    const li = element("li", { id: "hit" + i, role: "option", "aria-selected": i === hit }, box.is_call ? box.about.path : box.about.name, element("small", {}, about));
    li.addEventListener("pointerdown", (e) => (e.preventDefault(), take(box)));
    return li;
  });
  const nothing = search.value.trim() && !hits.length ? [element("li", {}, "Nothing is called so.")] : [];
  found_list.replaceChildren(...items, ...nothing);
  found_list.hidden = !found_list.children.length;
  search.setAttribute("aria-expanded", String(!found_list.hidden));
  if (hits.length) search.setAttribute("aria-activedescendant", "hit" + hit);
  else search.removeAttribute("aria-activedescendant");
  document.getElementById("hit" + hit)?.scrollIntoView({ block: "nearest" });
}

function take(box) {
  found_list.hidden = true;
  canvas.focus({ preventScroll: true });
  find(box);
}

search.addEventListener("input", look);
search.addEventListener("focus", look);
search.addEventListener("blur", () => (found_list.hidden = true));
search.addEventListener("keydown", (e) => {
  if (e.key === "ArrowDown" || e.key === "ArrowUp") {
    e.preventDefault();
    hit = hits.length ? (hit + (e.key === "ArrowDown" ? 1 : hits.length - 1)) % hits.length : 0;
    show_hits();
  } else if (e.key === "Enter" && hits[hit]) take(hits[hit]);
  else if (e.key === "Escape") (search.value = ""), look(), canvas.focus({ preventScroll: true });
});

const on = (id, what) => document.getElementById(id).addEventListener("click", what);
on("less", () => level(fold));
on("more", () => level(unfold));
on("fit", () => fit());
on("theme", turn_theme);
on("help", anywhere["?"]);
draw_legend();
draw();
show_details();
fit(READABLE);
