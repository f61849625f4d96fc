// A page of the results has every word of the query. The theme's search wants only one of them: "gradient accumulation"
// found every page about gradients. A query without such a page is asked again as the theme asks it.
{
  const QUERY = 2, RESULT = 3; // kinds of messages to and from the search's worker
  const OPERATORS = /(^|\s)[+-]|["~^:*]/; // the reader has said how the words belong together

  // Words that the search does not index, as far as readers write them.
  const OPTIONAL =
    /^(..?|all|and|any|are|can|does|for|from|get|has|have|how|its|not|own|that|the|this|what|when|where|which|who|why|with|your)$/i;

  const requireAll = (query) => {
    if (!query.trim() || OPERATORS.test(query)) return query;
    const require = (word) => (OPTIONAL.test(word) ? word : `+${word}*`); // with *: a word that begins so
    return query.trim().split(/\s+/).map(require).join(" ");
  };

  const Inner = window.Worker;
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.asked = []; // queries that are not answered yet, in order
      this.inner = new Inner(url);
      this.inner.addEventListener("message", (event) => this.answer(event.data));
    }
    postMessage(message) {
      if (message.type === QUERY) {
        const query = requireAll(message.data);
        this.asked.push(query === message.data ? null : message.data);
        message = { ...message, data: query };
      }
      this.inner.postMessage(message);
    }
    answer(message) {
      if (message.type === RESULT) {
        const query = this.asked.shift();
        // Not if the reader has typed on: the answer to the older query would come last, and stay.
        if (query && !message.data.items.length && !this.asked.length) {
          this.asked.push(null);
          this.inner.postMessage({ type: QUERY, data: query });
          return;
        }
      }
      this.dispatchEvent(new MessageEvent("message", { data: message }));
    }
    terminate() {
      this.inner.terminate();
    }
  };
}
