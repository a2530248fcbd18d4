// Search in pages that are opened from a folder: browsers start no worker there, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = true; // where the theme's script finds this name, it loads the files beside its own
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.ready = new Promise((resolve) => {
        frame.onload = () => {
          const inner = frame.contentWindow;
          const load = (src) => new Promise((done, failed) => {
            const script = inner.document.createElement("script");
            Object.assign(script, { src, onload: done, onerror: failed });
            inner.document.head.append(script);
          });
          inner.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(each)), Promise.resolve());
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          load(new URL(url, document.baseURI).href).then(() => resolve(inner));
        };
      });
      document.documentElement.append(frame);
    }

    postMessage(data) {
      this.ready.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }
  };
}
