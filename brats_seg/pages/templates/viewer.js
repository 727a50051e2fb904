// Draws the volumes of `case.py` with NiiVue in the elements of `viewer.html`: an instance for each scan, linked.

async function unpacked(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// the differences along Z, Y and X, added up again; see `_encode_voxels` in `case.py`
function decoded(bytes, [nx, ny, nz]) {
  const n = nx * ny * nz, voxels = new Uint16Array(n);
  for (let i = 0; i < n; i++) {
    const code = bytes[i] | (bytes[n + i] << 8);
    voxels[i] = (code >>> 1) ^ -(code & 1);
  }
  for (let i = nx * ny; i < n; i++) voxels[i] += voxels[i - nx * ny];
  for (let z = 0; z < nz; z++) {
    const start = z * nx * ny;
    for (let i = start + nx; i < start + nx * ny; i++) voxels[i] += voxels[i - nx];
    for (let y = 0; y < ny; y++) {
      const row = start + y * nx;
      for (let i = row + 1; i < row + nx; i++) voxels[i] += voxels[i - 1];
    }
  }
  return new Int16Array(voxels.buffer);
}

function bytesOf(text) { return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)); }

// Sections: the scan, the uncertainty, and the labels, which are NiiVue's drawing. The first label map, in the
// low four bits, is filled or outlined; the second has a dashed outline. A uniform has a line of its own.
const SECTION_SHADER = `#version 300 es
precision highp float;
precision highp int;
uniform highp sampler3D volume;
uniform highp sampler3D overlay;
uniform highp sampler3D drawing;
uniform highp sampler2D colormap;
uniform float overlays;
uniform float overlayOutlineWidth;
uniform float drawOpacity;
uniform float drawRimOpacity;
in vec3 texPos;
out vec4 color;
int codeAt(vec3 place) { return int(texture(drawing, place).r * 255.0 + 0.5); }
void paint(int code, float opacity) {
  vec4 colour = texelFetch(colormap, ivec2(code, textureSize(colormap, 0).y - 1), 0);
  color.rgb = mix(color.rgb, colour.rgb, colour.a * opacity);
}
void main() {
  vec3 right = dFdx(texPos) * overlayOutlineWidth, up = dFdy(texPos) * overlayOutlineWidth;
  int code = codeAt(texPos);
  int edges = (code ^ codeAt(texPos + right)) | (code ^ codeAt(texPos - right))
    | (code ^ codeAt(texPos + up)) | (code ^ codeAt(texPos - up));
  color = vec4(texture(volume, texPos).rgb, 1.0);
  vec4 over = texture(overlay, texPos);
  if (overlays > 0.0) color.rgb = mix(color.rgb, over.rgb, over.a);
  if (drawRimOpacity < 0.0) paint(code & 15, drawOpacity);
  else if ((edges & 15) != 0) paint(code & 15, drawRimOpacity);
  float dash = 6.0 * overlayOutlineWidth;
  if ((edges & 240) != 0 && mod(gl_FragCoord.x + gl_FragCoord.y, dash) < 0.6 * dash) paint(code & 240, 1.0);
}`;

// pixels of the smallest canvas that has room for four frames and the gaps between them
const SMALLEST_CANVAS = 64;
// as NiiVue names them
const VIEWS = ["Axial", "Coronal", "Sagittal", "Multiplanar", "Render"];

class CaseViewer {
  // root: element of `viewer.html`; values: JSON of the volumes, their grid, the label maps and the first position
  constructor(root, values) {
    this.root = root;
    this.values = values;
    this.images = {};
    this.panels = {};
    this.rulers = [];
  }

  async start(niivue) {
    this.root.dataset.on = "";
    for (const volume of this.values.volumes) await this.load(niivue, volume);
    for (const panel of this.all("panel")) await this.open(niivue, panel);
    const panels = Object.values(this.panels);
    for (const nv of panels) nv.broadcastTo(panels);
    this.modes = niivue.DRAG_MODE;
    this.connect();
    this.reset();
  }

  async load(niivue, volume) {
    const { name, low, high } = volume, bytes = await unpacked(volume.data);
    const isScan = !["labels", "uncertainty"].includes(name);
    // a NIfTI file, which is what NiiVue reads
    const voxels = isScan ? decoded(bytes, this.values.shape) : bytes;
    const file = await new Blob([bytesOf(volume.header), voxels]).arrayBuffer();
    const image = await niivue.NVImage.new(file, name + ".nii", isScan ? "gray" : "plasma", 1, null, low, high);
    // what is below the lowest value fades
    if (!isScan) image.colormapType = 2;
    this.images[name] = image;
    volume.data = "";
  }

  async open(niivue, panel) {
    const canvas = panel.querySelector("canvas"), { low, high } = this.limits(panel.dataset.panel);
    const nv = new niivue.Niivue({
      backColor: [0, 0, 0, 1], crosshairColor: [0.2, 0.9, 0.4, 0.7], show3Dcrosshair: true,
      crosshairWidth: 0.5, crosshairWidthUnit: "percent", crosshairGap: 5,
      multiplanarPadPixels: 12, multiplanarLayout: niivue.MULTIPLANAR_TYPE.GRID,
      multiplanarShowRender: niivue.SHOW_RENDER.ALWAYS,
      fontColor: [1, 1, 1, 1], showAllOrientationMarkers: true, measureTextColor: [1, 1, 1, 1],
      rulerWidth: 2, rulerColor: [1, 0.85, 0.2, 1], measureLineColor: [1, 0.85, 0.2, 1],
      isRadiologicalConvention: true, sagittalNoseLeft: true, dragAndDropEnabled: false,
      isOrientCube: false, logLevel: "silent", loadingText: "", textHeight: -1, fontMinPx: 13,
      isForceMouseClickToVoxelCenters: true, windowingGainFactor: (high - low) / 500,
    });
    // the keys of NiiVue are not those that the page names
    for (const kind of ["keydown", "keyup"]) {
      canvas.addEventListener(kind, (event) => event.stopImmediatePropagation());
    }
    // NiiVue links the instance that has the focus
    canvas.addEventListener("wheel", () => canvas.focus({ preventScroll: true }), { capture: true, passive: true });
    canvas.addEventListener("dblclick", () => this.showScan(this.scan ? "" : panel.dataset.panel));
    nv.onLocationChange = (place) => this.tell(place.mm);
    nv.onMeasurementCompleted = () => this.draw();
    // NiiVue also draws before the page has a layout and while it is hidden, in frames of negative size
    const draw = nv.drawScene.bind(nv);
    nv.drawScene = () => {
      if (!nv.volumes.length || Math.min(canvas.width, canvas.height) <= SMALLEST_CANVAS) return;
      draw();
      const { cal_min: from, cal_max: to } = nv.volumes[0];
      const digits = (x) => (high - low > 20 ? Math.round(x) : x.toPrecision(3));
      panel.querySelector("[data-greys]").textContent = `W ${digits(to - from)} L ${digits((from + to) / 2)}`;
    };
    await nv.attachToCanvas(canvas);
    nv.setCustomSliceShader(SECTION_SHADER);
    nv.addVolume(this.images[panel.dataset.panel]);
    if (this.images.labels) nv.loadDrawing(this.images.labels);
    // a line is seen over every scan
    nv.document.completedMeasurements = this.rulers;
    nv.overlayOutlineWidth = 1.2 * devicePixelRatio;
    this.panels[panel.dataset.panel] = nv;
  }

  all(name) { return this.root.querySelectorAll(`[data-${name}]`); }

  limits(name) { return this.values.volumes.find((volume) => volume.name === name); }

  connect() {
    const on = (name, kind, action) => this.all(name).forEach((element) =>
      element.addEventListener(kind, () => action(element)));
    on("scan", "click", (b) => this.showScan(b.dataset.scan));
    on("layer", "click", (b) => this.toggle(b.dataset.layer));
    on("view", "click", (b) => this.showView(b.dataset.view));
    on("tool", "click", (b) => this.take(b.dataset.tool));
    on("outline", "click", () => this.paint({ isOutline: !this.isOutline }));
    on("opacity", "input", (input) => this.paint({ opacity: input.value / 100 }));
    on("label", "change", () => this.paint());
    on("section", "input", (input) => this.goToSection(Number(input.dataset.section), Number(input.value)));
    on("greys-of", "input", () => this.window());
    on("preset", "change", (select) => this.window(...select.value.split(" ")));
    on("save", "click", () => this.save());
    on("reset", "click", () => this.reset());
    document.addEventListener("keydown", (event) => this.onKey(event), true);
  }

  draw() { Object.values(this.panels).forEach((nv) => nv.drawScene()); }

  press(kind, isOn) {
    this.all(kind).forEach((button) =>
      button.setAttribute("aria-pressed", String(isOn(button.dataset[kind]))));
  }

  // one scan, or "" for all
  showScan(name) {
    this.scan = name;
    this.root.toggleAttribute("data-single", Boolean(name) || Object.keys(this.panels).length === 1);
    this.all("panel").forEach((panel) => { panel.hidden = Boolean(name) && panel.dataset.panel !== name; });
    this.press("scan", (scan) => scan === name);
    if (name) this.panels[name].canvas.focus({ preventScroll: true });
  }

  showView(name) {
    this.view = name;
    Object.values(this.panels).forEach((nv) => nv.setSliceType(nv["sliceType" + name]));
    this.press("view", (view) => view === name);
  }

  // what dragging does; with the right button it sets window and level, and while zooming it moves the scan
  take(tool) {
    for (const nv of Object.values(this.panels)) {
      nv.opts.dragModePrimary = this.modes[tool];
      nv.setDragMode(tool === "pan" ? tool : "windowing");
    }
    this.press("tool", (name) => name === tool);
  }

  toggle(name) {
    this.isShown[name] = !this.isShown[name];
    this.press("layer", (layer) => this.isShown[layer]);
    if (name !== "uncertainty") { this.paint(); return; }
    for (const nv of Object.values(this.panels)) {
      if (this.isShown[name]) nv.addVolume(this.images[name]); else nv.removeVolume(this.images[name]);
    }
  }

  // colours of the labels by their codes, and how they are drawn
  paint(changes = {}) {
    Object.assign(this, changes);
    const isOn = (colour) => colour && this.root.querySelector(`[data-label="${colour}"]`)?.checked;
    const lut = new Uint8ClampedArray(1024);
    for (let code = 1; code < 256; code++) {
      const colours = this.values.sides.map(([name, , colours], k) =>
        this.isShown[name] && colours[(code >> (4 * k)) & 15]);
      const colour = colours.find(isOn);
      if (colour) lut.set([...[1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16)), 255], 4 * code);
    }
    for (const nv of Object.values(this.panels)) {
      Object.assign(nv, { drawLut: { lut, labels: [] }, drawOpacity: this.opacity,
        drawRimOpacity: this.isOutline ? 1 : -1 });
      nv.refreshColormaps();
    }
    this.all("opacity").forEach((input) => { input.value = Math.round(100 * this.opacity); });
    this.press("outline", () => this.isOutline);
    this.draw();
  }

  // window and level in percent of the usual greys of each scan; without values those of the sliders
  window(...greys) {
    const inputs = [...this.all("greys-of")];
    greys.forEach((value, i) => { inputs[i].value = value; });
    const [width, level] = inputs.map((input) => input.value / 100);
    for (const [name, nv] of Object.entries(this.panels)) {
      const { low, high } = this.limits(name);
      const [image] = nv.volumes, from = low + (high - low) * (level - width / 2);
      const to = from + (high - low) * width;
      if (image.cal_min === from && image.cal_max === to) continue;
      Object.assign(image, { cal_min: from, cal_max: to });
      nv.updateGLVolume();
    }
  }

  // everything as at first
  reset() {
    this.rulers.length = 0;
    if (this.isShown?.uncertainty) this.toggle("uncertainty");
    this.isShown = { prediction: true, reference: true, uncertainty: false };
    this.press("layer", (layer) => this.isShown[layer]);
    this.all("label").forEach((box) => { box.checked = true; });
    this.all("preset").forEach((select) => { select.selectedIndex = 0; });
    Object.values(this.panels).forEach((nv) => { nv.scene.pan2Dxyzmm = [0, 0, 0, 1]; });
    this.window(100, 50);
    this.paint({ opacity: 0.5, isOutline: false });
    this.take("crosshair");
    this.showScan("");
    this.showView("Axial");
    this.goTo(this.values.centre_mm);
  }

  goTo(mm) {
    for (const nv of Object.values(this.panels)) nv.scene.crosshairPos = nv.mm2frac(mm);
    this.draw();
    this.tell(mm);
  }

  goToSection(axis, index) {
    const [nv] = Object.values(this.panels), voxel = nv.frac2vox(nv.scene.crosshairPos);
    voxel[axis] = index;
    this.goTo(nv.frac2mm(nv.vox2frac(voxel)));
  }

  move(x, y, z) {
    const [nv] = Object.values(this.panels);
    nv.moveCrosshairInVox(x, y, z);
    this.goTo(nv.frac2mm(nv.scene.crosshairPos));
  }

  tell(mm) {
    const place = Array.from(mm).slice(0, 3), [nv] = Object.values(this.panels);
    const say = (name, words) => this.root.querySelectorAll(`[data-value="${name}"]`).forEach((cell) => {
      cell.textContent = words;
    });
    const voxel = this.values.to_file.slice(0, 3).map((row) =>
      Math.round(row[3] + place.reduce((sum, x, i) => sum + x * row[i], 0)));
    say("mm", place.map((x) => x.toFixed(1)).join(", "));
    say("voxel", voxel.join(", "));
    nv.frac2vox(nv.mm2frac(place)).forEach((index, axis) =>
      this.root.querySelectorAll(`[data-section="${axis}"]`).forEach((input) => {
        input.max = nv.back.dimsRAS[axis + 1] - 1;
        input.value = index;
      }));
    for (const [name, image] of Object.entries(this.images)) {
      const value = image.getValue(...image.mm2vox(place));
      if (name !== "labels") say(name, String(Number(value.toPrecision(name === "uncertainty" ? 2 : 6))));
      else this.values.sides.forEach(([side, tissues], k) => {
        const label = (value >> (4 * k)) & 15;
        say(side, label ? `${label}: ${tissues[label] || "?"}` : "none");
      });
    }
  }

  // what is seen, with its names, as one picture
  save() {
    const frame = this.root.querySelector(".panels").getBoundingClientRect(), scale = devicePixelRatio;
    const picture = document.createElement("canvas"), pen = picture.getContext("2d"), line = 18 * scale;
    picture.width = frame.width * scale;
    picture.height = frame.height * scale + 2 * line;
    pen.fillRect(0, 0, picture.width, picture.height);
    pen.fillStyle = "white";
    pen.font = `${13 * scale}px sans-serif`;
    for (const panel of this.all("panel")) {
      if (panel.hidden) continue;
      const box = panel.getBoundingClientRect();
      const x = (box.left - frame.left) * scale, y = (box.top - frame.top) * scale;
      // its content is there only until the next frame
      this.panels[panel.dataset.panel].drawScene();
      pen.drawImage(panel.querySelector("canvas"), x, y);
      pen.fillText(panel.innerText.replace(/\s+/g, " "), x + line / 2, y + line);
    }
    const words = `${this.values.title}, ${this.root.querySelector("[data-value=mm]").textContent} mm; research use only`;
    pen.fillText(words, line / 2, picture.height - line / 2);
    const link = document.createElement("a");
    Object.assign(link, { download: `${this.values.title}.png`, href: picture.toDataURL() }).click();
  }

  // the key of a button stands in its `data-key`
  onKey(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.tagName === "SELECT") return;
    // the patient's left is on the right
    const steps = { ArrowLeft: [1, 0, 0], ArrowRight: [-1, 0, 0], ArrowUp: [0, 1, 0], ArrowDown: [0, -1, 0],
      PageUp: [0, 0, 1], PageDown: [0, 0, -1] };
    const step = event.target.tagName === "CANVAS" && steps[event.key];
    const button = /^[a-z0-9]$/i.test(event.key) &&
      this.root.querySelector(`[data-key="${event.key.toLowerCase()}"]`);
    if (step) this.move(...step);
    else if (button) button.click();
    else if (event.key.toLowerCase() === "v") this.showView(VIEWS[(VIEWS.indexOf(this.view) + 1) % VIEWS.length]);
    else if (event.key === "+" || event.key === "-") {
      this.paint({ opacity: Math.min(1, Math.max(0, this.opacity + Number(`${event.key}0.1`))) });
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

// Starts the viewer of a page; without WebGL 2 the pictures stay, and a sentence says why.
async function startViewer() {
  const root = document.querySelector(".viewer"), absent = document.querySelector(".viewer-absent");
  const explain = (why) => {
    absent.textContent = `The viewer cannot start here: ${why}. The pictures show the same case.`;
    absent.hidden = false;
    delete root.dataset.on;
  };
  if (!document.createElement("canvas").getContext("webgl2")) {
    explain("this browser has no WebGL 2");
    return;
  }
  if (!window.DecompressionStream) { explain("this browser is too old"); return; }
  try {
    const script = document.createElement("script");
    const text = document.getElementById("niivue").textContent;
    script.textContent = new TextDecoder().decode(await unpacked(text.trim()));
    document.head.append(script);
    window.viewer = new CaseViewer(root, JSON.parse(document.getElementById("volumes").textContent));
    await window.viewer.start(window.niivue);
    document.querySelectorAll("details.pictures").forEach((element) => { element.open = false; });
    document.documentElement.dataset.viewer = "ready";
  } catch (error) {
    explain(error.message);
    document.documentElement.dataset.viewer = "failed";
  }
}

// what is closed would not be printed
window.addEventListener("beforeprint", () =>
  document.querySelectorAll("details.pictures").forEach((element) => { element.open = true; }));
document.addEventListener("click", (event) => {
  const place = event.target.closest("[data-mm]");
  if (place && window.viewer) {
    window.viewer.goTo(JSON.parse(place.dataset.mm));
    window.viewer.root.scrollIntoView({ block: "nearest" });
  }
});
window.viewerStarted = startViewer();
