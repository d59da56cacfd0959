// Puts a page that was fetched anew in the place of the one that is shown. What is the same stays where it is, so that a
// link or a summary keeps its focus; what differs is replaced, and says so to screen readers by its data-say.
"use strict";
function mainOf(text) {
  const page = new DOMParser().parseFromString(text, "text/html");
  return { title: page.title, main: page.querySelector("main") };
}
function renewPage(main, fresh, title) {
  for (const one of main.querySelectorAll("details[id]")) { // opened by the person who reads
    const same = [...fresh.querySelectorAll("details[id]")].find((other) => other.id === one.id);
    if (same) same.open = one.open || same.open;
  }
  const before = said(main), held = main.contains(document.activeElement) ? document.activeElement : null;
  const name = held && nameOf(held);
  replaceWhatDiffers(main, fresh);
  main.dataset.now = fresh.dataset.now;
  document.title = title;
  if (held && !main.contains(document.activeElement)) {
    const same = [...main.querySelectorAll(held.tagName)].find((one) => nameOf(one) === name);
    (same || main).focus({ preventScroll: true });
  }
  const news = said(main).filter((text) => !before.includes(text)).join(". ");
  if (news) document.getElementById("news").textContent = news;
}
function said(main) {
  return [...main.querySelectorAll("[data-say]")].map((one) => one.dataset.say).filter(Boolean);
}
function nameOf(one) { // what is the same link, summary or button on another copy of the page
  const around = one.closest("[id]");
  return [one.tagName, one.getAttribute("href"), one.value, one.id, around && around.id].join(" ");
}
function replaceWhatDiffers(old, fresh) {
  let was = [...old.childNodes], now = [...fresh.childNodes];
  while (was.length && now.length && was[0].isEqualNode(now[0])) { was.shift(); now.shift(); }
  while (was.length && now.length && was.at(-1).isEqualNode(now.at(-1))) { was.pop(); now.pop(); }
  const alike = was.length === now.length && was.every((one, n) => one.nodeType === 1
    ? one.cloneNode().isEqualNode(now[n].cloneNode()) : one.nodeType === now[n].nodeType);
  if (alike) {
    was.forEach((one, n) => one.nodeType === 1 ? replaceWhatDiffers(one, now[n]) : one.replaceWith(now[n]));
    return;
  }
  const after = was.length ? was.at(-1).nextSibling : placeBefore(old, fresh, now);
  was.forEach((one) => one.remove());
  now.forEach((one) => old.insertBefore(one, after));
}
function placeBefore(old, fresh, now) { // nothing goes: what is new comes before as many nodes as follow it there
  const follow = now.length ? fresh.childNodes.length - [...fresh.childNodes].indexOf(now.at(-1)) - 1 : 0;
  return follow ? old.childNodes[old.childNodes.length - follow] : null;
}
