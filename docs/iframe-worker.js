// Browsers start no workers for pages that are opened from a folder: there, the search's worker runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      const load = (source) =>
        new Promise((loaded, failed) => {
          const script = frame.contentDocument.createElement("script");
          script.onload = loaded;
          script.onerror = failed;
          script.src = source;
          frame.contentDocument.body.append(script);
        });
      this.ready = new Promise((started) => {
        document.body.append(frame);
        frame.contentWindow.importScripts = (...sources) => Promise.all(sources.map(load));
        frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        load(url).then(() => started(frame));
      });
      this.frame = frame;
    }

    postMessage(data) {
      this.ready.then(({ contentWindow }) => contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
