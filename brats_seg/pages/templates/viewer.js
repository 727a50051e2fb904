// Draws the volumes of `case.py` with NiiVue, in the elements of `viewer.html`.

async function unpacked(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// the differences along Z, Y and X, added up again; see `_coded` in `case.py`
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

// the voxels of each tissue that have a neighbour of another: a reference is seen over a prediction
function outlined(labels, [nx, ny, nz]) {
  const outline = new Uint8Array(labels.length);
  for (let z = 0, i = 0; z < nz; z++) for (let y = 0; y < ny; y++) for (let x = 0; x < nx; x++, i++) {
    const own = labels[i];
    if (own && (x === 0 || x === nx - 1 || y === 0 || y === ny - 1 ||
        labels[i - 1] !== own || labels[i + 1] !== own ||
        labels[i - nx] !== own || labels[i + nx] !== own)) outline[i] = own;
  }
  return outline;
}

function product(matrix, [x, y, z]) {
  return matrix.slice(0, 3).map((row) => row[0] * x + row[1] * y + row[2] * z + row[3]);
}

// pixels of the smallest canvas that has room for four frames and the gaps between them
const SMALLEST_CANVAS = 64;

class CaseViewer {
  // root: element of `viewer.html`; values: JSON of the volumes, their grid, the tissues and the first position
  constructor(root, values) {
    this.root = root;
    this.values = values;
    this.voxels = {};
    this.images = {};
  }

  async start(niivue) {
    const canvas = this.root.querySelector("canvas");
    // the keys of NiiVue are not those that the page names
    for (const kind of ["keydown", "keyup"]) {
      canvas.addEventListener(kind, (event) => event.stopImmediatePropagation());
    }
    this.root.hidden = false;
    this.nv = new niivue.Niivue({
      backColor: [0, 0, 0, 1], crosshairColor: [0.2, 0.9, 0.4, 0.7], show3Dcrosshair: true,
      crosshairWidth: 0.6, crosshairWidthUnit: "percent", crosshairGap: 5,
      multiplanarPadPixels: 16,
      fontColor: [1, 1, 1, 1], showAllOrientationMarkers: true,
      isRadiologicalConvention: true, sagittalNoseLeft: true, dragAndDropEnabled: false, scrollRequiresFocus: true,
      isOrientCube: false, logLevel: "silent", loadingText: "", textHeight: -1, fontMinPx: 13,
      isNearestInterpolation: true, isForceMouseClickToVoxelCenters: true,
    });
    this.nv.setMultiplanarLayout(niivue.MULTIPLANAR_TYPE.GRID);
    this.nv.opts.multiplanarShowRender = niivue.SHOW_RENDER.ALWAYS;
    this.nv.onLocationChange = (place) => this.tell(place.mm);
    // NiiVue also draws before the page has a layout and while it is hidden, in frames of negative size
    const draw = this.nv.drawScene.bind(this.nv);
    this.nv.drawScene = () => Math.min(canvas.width, canvas.height) > SMALLEST_CANVAS && draw();
    await this.nv.attachToCanvas(canvas);
    await this.load(niivue);
    this.connect();
    this.reset();
  }

  async load(niivue) {
    const { shape, volumes, tissues } = this.values;
    for (const volume of volumes) {
      const bytes = await unpacked(volume.data);
      const isLabels = volume.name in tissues, isScan = !isLabels && volume.name !== "uncertainty";
      const isOutline = volume.name === "reference" && "prediction" in tissues;
      const voxels = isScan ? decoded(bytes, shape) : bytes;
      this.voxels[volume.name] = { voxels, step: volume.step };
      const drawn = isOutline ? outlined(voxels, shape) : voxels;
      // a NIfTI file, which is what NiiVue reads
      const file = await new Blob([bytesOf(volume.header), drawn]).arrayBuffer();
      const colours = isLabels ? "" : isScan ? "gray" : "plasma";
      const image = await niivue.NVImage.new(
        file, volume.name + ".nii", colours, 1, null, volume.low, volume.high);
      if (isLabels) image.setColormapLabel(tissues[volume.name].colours);
      this.images[volume.name] = { image, isOutline, low: volume.low, high: volume.high };
      volume.data = "";
    }
  }

  connect() {
    const all = (name) => this.root.querySelectorAll(`[data-${name}]`);
    all("scan").forEach((b) => b.addEventListener("click", () => this.showScan(b.dataset.scan)));
    all("layer").forEach((b) => b.addEventListener("click", () => this.toggle(b.dataset.layer)));
    all("view").forEach((b) => b.addEventListener("click", () => this.showView(b.dataset.view)));
    all("reset").forEach((b) => b.addEventListener("click", () => this.reset()));
    all("opacity").forEach((input) =>
      input.addEventListener("input", () => this.setOpacity(input.value / 100)));
    this.root.addEventListener("keydown", (event) => this.onKey(event), true);
  }

  // the scan is the first volume, on whose grid NiiVue draws, and the layers lie over it
  draw() {
    const layers = ["prediction", "uncertainty", "reference"]
      .filter((name) => this.isShown[name] && this.images[name]);
    for (const name of layers) {
      this.images[name].image.opacity = this.images[name].isOutline ? 1 : this.opacity;
    }
    this.nv.volumes = [this.scan, ...layers].map((name) => this.images[name].image);
    this.nv.setVolume(this.images[this.scan].image, 0);
    this.nv.drawScene();
    this.press("scan", (name) => name === this.scan);
    this.press("layer", (name) => this.isShown[name]);
  }

  press(kind, isOn) {
    this.root.querySelectorAll(`[data-${kind}]`).forEach((button) =>
      button.setAttribute("aria-pressed", String(isOn(button.dataset[kind]))));
  }

  showScan(name) { this.scan = name; this.draw(); }

  toggle(name) {
    if (!this.images[name]) return;
    this.isShown[name] = !this.isShown[name];
    this.draw();
  }

  setOpacity(share) {
    this.opacity = Math.min(1, Math.max(0, share));
    this.root.querySelectorAll("[data-opacity]").forEach((input) => {
      input.value = Math.round(this.opacity * 100);
    });
    this.draw();
  }

  showView(name) {
    this.view = name;
    this.nv.setSliceType(this.nv["sliceType" + { all: "Multiplanar", axial: "Axial",
      coronal: "Coronal", sagittal: "Sagittal", space: "Render" }[name]]);
    this.press("view", (view) => view === name);
  }

  // everything as at first
  reset() {
    for (const { image, low, high } of Object.values(this.images)) {
      image.cal_min = low;
      image.cal_max = high;
    }
    this.nv.scene.pan2Dxyzmm = [0, 0, 0, 1];
    this.isShown = { prediction: true, reference: !this.images.prediction, uncertainty: false };
    this.scan = "t1c";
    this.setOpacity(0.5);
    this.showView("all");
    this.goTo(this.values.centre_mm);
  }

  goTo(mm) {
    this.nv.scene.crosshairPos = this.nv.mm2frac(mm);
    this.nv.drawScene();
    this.tell(mm);
  }

  move(x, y, z) {
    this.nv.moveCrosshairInVox(x, y, z);
    this.tell(this.nv.frac2mm(this.nv.scene.crosshairPos));
  }

  // value of a volume at a place in mm; null outside of what is embedded
  valueAt(name, mm) {
    const [nx, ny, nz] = this.values.shape;
    const [x, y, z] = product(this.values.to_voxel, mm).map(Math.round);
    if (x < 0 || y < 0 || z < 0 || x >= nx || y >= ny || z >= nz) return null;
    const { voxels, step } = this.voxels[name];
    return voxels[x + nx * (y + ny * z)] * step;
  }

  tell(mm) {
    const place = Array.from(mm).slice(0, 3);
    const say = (name, words) => {
      const cell = this.root.querySelector(`[data-value="${name}"]`);
      if (cell) cell.textContent = words;
    };
    say("mm", place.map((x) => x.toFixed(1)).join(", "));
    say("voxel", product(this.values.to_file, place).map(Math.round).join(", "));
    for (const name of Object.keys(this.voxels)) {
      const value = this.valueAt(name, place), tissues = this.values.tissues[name];
      if (value === null) say(name, "outside");
      else if (tissues) say(name, value ? `${value}: ${tissues.names[value] || "?"}` : "none");
      else say(name, String(Number(value.toPrecision(name === "uncertainty" ? 2 : 6))));
    }
  }

  onKey(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const scans = Array.from(this.root.querySelectorAll("[data-scan]"), (b) => b.dataset.scan);
    const views = ["all", "axial", "coronal", "sagittal", "space"];
    const onCanvas = event.target === this.root.querySelector("canvas");
    const actions = {
      p: () => this.toggle("prediction"),
      r: () => this.toggle("reference"),
      u: () => this.toggle("uncertainty"),
      v: () => this.showView(views[(views.indexOf(this.view || "all") + 1) % views.length]),
      0: () => this.reset(),
      "+": () => this.setOpacity(this.opacity + 0.1),
      "-": () => this.setOpacity(this.opacity - 0.1),
    };
    scans.forEach((name, i) => { actions[i + 1] = () => this.showScan(name); });
    // the patient's left is on the right
    if (onCanvas) Object.assign(actions, {
      ArrowLeft: () => this.move(1, 0, 0), ArrowRight: () => this.move(-1, 0, 0),
      ArrowUp: () => this.move(0, 1, 0), ArrowDown: () => this.move(0, -1, 0),
      PageUp: () => this.move(0, 0, 1), PageDown: () => this.move(0, 0, -1),
    });
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  }
}

// Starts the viewers of a page; without WebGL 2 the pictures stay, and a sentence says why.
async function startViewers() {
  const roots = Array.from(document.querySelectorAll(".viewer"));
  const explain = (why) => document.querySelectorAll(".viewer-absent").forEach((element) => {
    element.textContent = `The viewer cannot start here: ${why}. The pictures show the same case.`;
    element.hidden = false;
  });
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
    window.viewers = [];
    for (const root of roots) {
      const values = JSON.parse(document.getElementById(root.dataset.values).textContent);
      const viewer = new CaseViewer(root, values);
      window.viewers.push(viewer);
      await viewer.start(window.niivue);
    }
    document.querySelectorAll("details.pictures").forEach((element) => { element.open = false; });
    document.documentElement.dataset.viewer = "ready";
  } catch (error) {
    roots.forEach((root) => { root.hidden = true; });
    explain(error.message);
    document.documentElement.dataset.viewer = "failed";
  }
}

// what is closed would not be printed
window.addEventListener("beforeprint", () =>
  document.querySelectorAll("details.pictures").forEach((element) => { element.open = true; }));
document.addEventListener("click", (event) => {
  const place = event.target.closest("[data-mm]");
  if (place && window.viewers) {
    window.viewers.forEach((viewer) => viewer.goTo(JSON.parse(place.dataset.mm)));
    window.viewers[0].root.scrollIntoView({ block: "nearest" });
  }
});
window.viewersStarted = startViewers();
