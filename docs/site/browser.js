// Returns what is wrong with the page as it is shown now, a line for each fault; see browser.py.
(() => {
  const faults = new Set(), root = document.documentElement, print = matchMedia("print").matches;
  const say = (what, element) => faults.add(`${what}: ${(element.textContent.trim() || element.getAttribute("src") || element.tagName)
    .replace(/\s+/g, " ").slice(0, 60)}`);
  const shown = element => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const scrolls = element => /auto|scroll|hidden|clip/.test(getComputedStyle(element).overflowX);
  const scroller = element => { for (let e = element.parentElement; e; e = e.parentElement) if (scrolls(e)) return e; return null; };
  const wide = root.scrollWidth - root.clientWidth;
  if (wide > 1 && root.localName == "html") faults.add(`is ${wide} px wider than the window`);

  // Text of drawings beyond their box, images beyond the window or within what scrolls, and images too small to read.
  for (const text of document.querySelectorAll("svg text")) {
    if (!shown(text)) continue;
    let box = text.ownerSVGElement;
    while (box.ownerSVGElement) box = box.ownerSVGElement;
    const outer = (box.closest("figure, .drawn") || box).getBoundingClientRect(), r = text.getBoundingClientRect();
    if (r.left < outer.left - 3 || r.right > outer.right + 3) say("text is cut off", text);
    if (r.height < 8) say("text is too small to read", text);
  }
  for (const image of document.querySelectorAll("article img, main img")) {
    if (!shown(image)) continue;
    const r = image.getBoundingClientRect(), view = scroller(image);
    const limit = view && view != document.body ? view.getBoundingClientRect().right : root.clientWidth;
    if (r.right > limit + 2 && !image.closest("table")) say("an image is cut off", image);
    if (/\.svg$/.test(image.currentSrc) && r.width < .7 * image.naturalWidth) say("an image is too small to read", image);
    if (!image.complete || !image.naturalWidth) say("an image is not shown", image);
  }

  // On a phone the tables of the site are whole.
  if (!print && root.clientWidth < 700) for (const table of document.querySelectorAll("article .table-wrapper"))
    if (shown(table) && table.scrollWidth > table.clientWidth + 2) say("a table is cut off", table);

  // On paper nothing scrolls, and a heading is not the last line of a page.
  if (print) {
    for (const element of document.querySelectorAll("article *, main *")) {
      if (shown(element) && scrolls(element) && element.scrollWidth > element.clientWidth + 2 && element.clientWidth)
        say("is cut off on paper", element);
      if (/^h[1-4]$/.test(element.localName) && getComputedStyle(element).breakAfter != "avoid") say("may be the last line of a page", element);
      if (element.localName == "details" && !element.open && !element.matches(".card details, #settings details") &&
          getComputedStyle(element, "::details-content").contentVisibility == "hidden") say("is folded on paper", element);
    }
  }

  // Contrast of text with what is behind it.
  const luminance = color => { const [r, g, b] = color.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const numbers = text => (text.match(/[\d.]+/g) || []).map(Number);
  const ground = element => { for (let e = element; e; e = e.parentElement) {
    const c = numbers(getComputedStyle(e).backgroundColor); if (c.length == 3 || c[3] > .9) return c.slice(0, 3); } return [255, 255, 255]; };
  for (const element of print ? [] : document.querySelectorAll("body *")) {
    if (element.namespaceURI.endsWith("svg") || ![...element.childNodes].some(n => n.nodeType == 3 && n.textContent.trim()) || !shown(element)) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const [a, b] = [luminance(numbers(style.color).slice(0, 3)), luminance(ground(element))].sort((x, y) => y - x);
    const least = size >= 24 || (size >= 18.6 && style.fontWeight >= 700) ? 3 : 4.5;
    if ((a + .05) / (b + .05) < least - .05) say(`pale text (${((a + .05) / (b + .05)).toFixed(1)}, ${style.color})`, element);
  }
  return [...faults].slice(0, 30);
})()
