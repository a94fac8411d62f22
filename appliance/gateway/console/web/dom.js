// Elements, made and kept: what has not changed is not touched, so nothing flickers and a screen reader hears only news.
// All text goes in as text. Nothing here, or anywhere in the page, turns a string into markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with attributes, listeners (`onclick`), and children that are nodes or text. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same of SVG. */
export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else setAttribute(node, name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Set text, if it is another one. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Set a number as text; nothing is written fainter, so that the eye finds what is something. */
export function setNumber(node, value, format) {
  setText(node, format(value));
  setAttribute(node, "data-none", !value);
}

/** Set or take away an attribute, if it is another one. */
export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
    return;
  }
  const wanted = value === true ? "" : String(value);
  if (node.getAttribute(name) !== wanted) node.setAttribute(name, wanted);
}

/** Set a property of the style by the CSSOM, which a strict policy allows where it allows no style attribute. */
export function setStyle(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

/**
 * Keep a parent's children in step with a list. `key(item)` names an item, `build(item)` gives
 * `{node, update(item), extra?}`; `extra` is a second node right behind the first.
 */
export class Keyed {
  constructor(parent, key, build) {
    this.parent = parent;
    this.key = key;
    this.build = build;
    this.views = new Map();
  }

  show(items) {
    const focus = this.parent.contains(document.activeElement) ? document.activeElement : null;
    const gone = new Set(this.views.keys());
    let place = this.parent.firstChild;
    for (const item of items) {
      const key = this.key(item);
      gone.delete(key);
      let view = this.views.get(key);
      if (!view) this.views.set(key, (view = this.build(item)));
      view.update(item);
      for (const node of view.extra ? [view.node, view.extra] : [view.node]) {
        if (node === place) place = place.nextSibling;
        else this.parent.insertBefore(node, place);
      }
    }
    for (const key of gone) {
      const view = this.views.get(key);
      view.node.remove();
      if (view.extra) view.extra.remove();
      this.views.delete(key);
    }
    // A node that is moved loses the focus; whoever works with a keyboard shall not.
    if (focus && focus !== document.activeElement && focus.isConnected) focus.focus({ preventScroll: true });
  }
}

/** A row of cells that are kept: `cells` are `[class, makeText]`. */
export function cells(kinds) {
  return kinds.map(([tag, className]) => make(tag, tag === "th" ? { scope: "row", class: className } : { class: className }));
}
