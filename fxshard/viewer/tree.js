// The plan as a tree: calls of modules, open or closed, with nodes as leaves.
// page.json: {calls: [{key, path, label, parent, kind, result, open}], nodes: [{..., call, kind, label}], edges: [[a, b]],
//             order: those of the edges that only put random draws into their order}

const plan = JSON.parse(document.getElementById("plan").textContent);
const boxes = new Map(); // by id: "c:KEY" a call, "n:NAME" a node
const top_box = { id: "", label: "", children: [], open: true, parent: null, depth: 0, is_call: true };

function add_box(id, parent, about) {
  const box = { id, parent, depth: parent.depth + 1, children: [], names: [], ...about };
  boxes.set(id, box);
  return box;
}

for (const call of plan.calls) {
  const parent = call.parent === null ? top_box : boxes.get("c:" + call.parent);
  add_box("c:" + call.key, parent, { is_call: true, label: call.label, kind: call.kind, about: call, open: call.open });
}
for (const node of plan.nodes.filter((n) => !n.is_state)) {
  const parent = node.call === null ? top_box : boxes.get("c:" + node.call);
  add_box("n:" + node.name, parent, { is_call: false, label: node.label, kind: node.kind, about: node });
}
const nodes_by_name = new Map(plan.nodes.map((n) => [n.name, n]));
const in_order = new Set(plan.order.map(String));
const place_of = new Map(plan.nodes.map((n, i) => [n.name, i]));

// children in program order: a call comes where its first node does
for (const node of plan.nodes.filter((n) => !n.is_state)) {
  for (let box = boxes.get("n:" + node.name); box.parent; box = box.parent) {
    box.names.push(node.name);
    if (box.parent.children.at(-1) !== box) box.parent.children.push(box);
  }
}

function path_to(box) {
  const found = [];
  for (; box; box = box.parent) found.unshift(box);
  return found;
}

// the box that stands for another: itself, or the outermost closed call around it
function seen(box) {
  return path_to(box).find((b) => b.is_call && !b.open) || box;
}

function seen_in_order(box = top_box, found = []) {
  for (const child of box.children) {
    found.push(child);
    if (child.is_call && child.open) seen_in_order(child, found);
  }
  return found;
}

function leaves_seen() {
  return seen_in_order().filter((b) => !b.is_call || !b.open).length;
}

function reveal(box) {
  const closed = path_to(box.parent).filter((outer) => !outer.open);
  closed.forEach((outer) => (outer.open = true));
  return closed.length > 0;
}

// open or close the calls at one depth
function unfold() {
  const closed = seen_in_order().filter((b) => b.is_call && !b.open);
  const depth = Math.min(...closed.map((b) => b.depth));
  closed.filter((b) => b.depth === depth).forEach((b) => (b.open = true));
}
function fold() {
  const open = seen_in_order().filter((b) => b.is_call && b.open);
  const depth = Math.max(...open.map((b) => b.depth));
  open.filter((b) => b.depth === depth).forEach((b) => (b.open = false));
}

// what is sent for all nodes in a box: {forward: {halo: {messages, bytes}}, backward: ...}
function sent_by(box) {
  if (box.sent) return box.sent;
  box.sent = { forward: {}, backward: {} };
  for (const name of box.names) {
    for (const way of ["forward", "backward"]) {
      for (const [kind, t] of Object.entries(nodes_by_name.get(name).sent[way])) {
        const sum = (box.sent[way][kind] ??= { messages: 0, bytes: 0 });
        sum.messages += t.messages;
        sum.bytes += t.bytes;
      }
    }
  }
  return box.sent;
}

function result_of(box) {
  return nodes_by_name.get(box.is_call ? box.about.result : box.about.name);
}

const sizes = (shape) => (shape === null ? "" : shape.join("x") || "scalar");
function bytes(count) {
  for (const [unit, of] of [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]]) if (count >= of) return (count / of).toFixed(1) + " " + unit;
  return count + " B";
}
function binary(count) {
  for (const [unit, of] of [["GiB", 2 ** 30], ["MiB", 2 ** 20]]) if (count >= of) return (count / of).toFixed(2) + " " + unit;
  return (count / 1024).toFixed(2) + " KiB";
}
