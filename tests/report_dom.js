// As much of a browser's document as the page's script uses, to run it in Node; prints what it drew as JSON.
"use strict";
const fs = require("fs");
const [page] = process.argv.slice(2);
const text = fs.readFileSync(page, "utf8");
const json = text.match(/<script type="application\/json">([^<]*)<\/script>/)[1];
const code = text.match(/<script>([^]*?)<\/script>/)[1];

class Element {
  constructor(name) { Object.assign(this, {name, attributes: {}, children: [], listeners: {}, textContent: ""}); }
  setAttribute(key, value) { this.attributes[key] = String(value); }
  append(...more) { for (const one of more) if (typeof one === "string") this.textContent += one; else this.children.push(one); }
  prepend(...more) { this.children = this.children.filter(one => !more.includes(one)); this.children.unshift(...more); }
  replaceChildren() { this.children = []; }
  addEventListener(name, act) { this.listeners[name] = act; }
  getBoundingClientRect() { return {left: 0, top: 0}; }
  get clientWidth() { return 700; }
  get classList() { return {add: name => this.setAttribute("class", name)}; }
  all(name) { return this.children.flatMap(one => [...(one.name === name ? [one] : []), ...one.all(name)]); }
}

const figure = new Element("figure");
const picture = new Element("picture"), data = new Element("script");
data.textContent = json;
figure.append(picture);
figure.querySelector = name => name === "script" ? data : picture;
global.document = {
  createElementNS: (_, name) => new Element(name),
  createElement: name => new Element(name),
  querySelectorAll: () => [figure],
};
global.ResizeObserver = class { observe() {} };
eval(code);

const box = figure.children.find(one => one.attributes.class === "plot");
const note = figure.children.find(one => one.attributes.class === "hover");
const buttons = figure.all("button");
const press = name => buttons.find(one => one.textContent === name).listeners.click();
const state = () => ({
  curves: box.all("polyline").map(one => one.attributes.points.split(" ").map(pair => pair.split(",").map(Number))),
  labels: box.all("text").map(one => one.textContent),
  pressed: buttons.filter(one => one.attributes["aria-pressed"] === "true").map(one => one.textContent),
});
const found = {buttons: buttons.map(one => one.textContent), first: state()};
const [x, y] = found.first.curves[0][2];
box.listeners.pointermove({clientX: x + 1, clientY: y});
found.hover = note.textContent;
press("steps");
press("log");
found.steps = state();
press("bigbird");
found.hidden = state();
process.stdout.write(JSON.stringify(found));
