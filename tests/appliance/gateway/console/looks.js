// Run in the page by the tests: contrast of all text, and what a checker of accessibility would ask.
(() => {
  const parse = (text) => {
    const parts = text.match(/[\d.]+/g).map(Number);
    return { r: parts[0], g: parts[1], b: parts[2], a: parts.length > 3 ? parts[3] : 1 };
  };
  const channel = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ({ r, g, b }) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ratio = (one, other) => {
    const [light, dark] = [luminance(one), luminance(other)].sort((x, y) => y - x);
    return (light + 0.05) / (dark + 0.05);
  };
  const over = (top, below) => ({ r: top.r * top.a + below.r * (1 - top.a), g: top.g * top.a + below.g * (1 - top.a),
    b: top.b * top.a + below.b * (1 - top.a), a: 1 });
  function ground(element) {
    const layers = [];
    for (let node = element; node; node = node.parentElement) layers.push(parse(getComputedStyle(node).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), { r: 255, g: 255, b: 255, a: 1 });
  }
  const seen = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && element.getClientRects().length > 0;
  const path = (element) => `${element.tagName.toLowerCase()}${element.id ? `#${element.id}` : ""}.${element.getAttribute("class") ?? ""}`;

  window.looks = {
    /** Pairs of text and ground below the bar of WCAG 2.2 AA: [what, ratio]; and how many were looked at. */
    contrast() {
      const poor = [];
      let looked = 0;
      const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.textContent.trim() || !seen(element) || element.closest(":disabled, .hidden, noscript, .skip")) continue;
        const style = getComputedStyle(element);
        const size = parseFloat(style.fontSize);
        const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        const below = ground(element);
        const found = ratio(over(parse(style.color), below), below);
        looked += 1;
        if (found < (large ? 3 : 4.5)) poor.push([`${path(element)} ${walker.currentNode.textContent.slice(0, 30)}`, found]);
      }
      return { poor, looked };
    },

    /** Marks that carry meaning by colour, below 3:1 against what is behind them. */
    marks() {
      const poor = [];
      let looked = 0;
      for (const mark of document.querySelectorAll(".dot, .mark, .span, .meter .track span")) {
        if (!seen(mark)) continue;
        looked += 1;
        const found = ratio(parse(getComputedStyle(mark).backgroundColor), ground(mark.parentElement));
        if (found < 3) poor.push([path(mark), found]);
      }
      for (const cell of document.querySelectorAll(".map rect:not(.free), .swatch rect:not(.free)")) {
        looked += 1;
        const found = ratio(parse(getComputedStyle(cell).stroke), ground(cell.closest("svg")));
        if (found < 3) poor.push([path(cell), found]);
      }
      for (const line of document.querySelectorAll(".line[d]")) {
        looked += 1;
        const found = ratio(parse(getComputedStyle(line).stroke), ground(line.closest("svg")));
        if (found < 3) poor.push([path(line), found]);
      }
      return { poor, looked };
    },

    /** What is wrong with names, roles, references and order, in words. */
    semantics() {
      const wrong = [];
      const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
      if (new Set(ids).size !== ids.length) wrong.push("an id is there twice");
      for (const name of ["aria-labelledby", "aria-controls", "aria-describedby"]) {
        for (const node of document.querySelectorAll(`[${name}]`)) {
          for (const id of node.getAttribute(name).split(" ")) if (!document.getElementById(id)) wrong.push(`${name} of ${path(node)}: ${id}`);
        }
      }
      const named = (node) => (node.getAttribute("aria-label") || node.labels?.[0]?.textContent || node.textContent || "").trim();
      for (const node of document.querySelectorAll("button, input, a[href], [role=img]")) if (!named(node)) wrong.push(`no name: ${path(node)}`);
      for (const node of document.querySelectorAll("section, [role=region], [role=group]")) {
        if (!node.getAttribute("aria-label") && !node.getAttribute("aria-labelledby")) wrong.push(`no label: ${path(node)}`);
      }
      for (const node of document.querySelectorAll("th")) if (!node.getAttribute("scope")) wrong.push(`no scope: ${path(node)}`);
      for (const node of document.querySelectorAll("ul, ol")) if ([...node.children].some((one) => one.tagName !== "LI")) wrong.push(`not of items: ${path(node)}`);
      const levels = [...document.querySelectorAll("h1, h2, h3, h4")].filter(seen).map((node) => Number(node.tagName[1]));
      if (levels[0] !== 1 || levels.filter((level) => level === 1).length !== 1) wrong.push("not one first heading");
      levels.forEach((level, index) => { if (index && level > levels[index - 1] + 1) wrong.push(`heading ${level} after ${levels[index - 1]}`); });
      for (const tag of ["header", "main", "footer"]) if (document.querySelectorAll(`body > ${tag}`).length !== 1) wrong.push(`not one ${tag}`);
      if (!document.documentElement.lang || !document.title) wrong.push("no language or title");
      for (const node of document.querySelectorAll("[tabindex]")) if (node.tabIndex > 0) wrong.push(`tab order: ${path(node)}`);
      for (const node of document.querySelectorAll("button, input")) {
        const box = node.getBoundingClientRect();
        const row = node.closest("tr")?.getBoundingClientRect();
        if (seen(node) && Math.max(box.height, row ? row.height : 0) < 24) wrong.push(`target of ${box.height} px: ${path(node)}`);
      }
      return wrong;
    },

    /** What sticks out of the page's width. */
    overflow() {
      const width = document.documentElement.clientWidth;
      return [...document.querySelectorAll("body *")]
        .filter((node) => seen(node) && !node.closest(".scroll, .skip, .hidden, svg") && node.getBoundingClientRect().right > width + 0.5)
        .map(path);
    },
  };
})();
