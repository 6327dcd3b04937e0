//! What is known of this node's object in the API: its name and UID, which owners of slices and events about the node need.
//!
//! Read at the start, every few minutes, and when somebody found that an owner is no more. While the API server is away the last
//! known facts stand; when it says that there is no such node there are none.

use std::sync::Arc;

use serde::Deserialize;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

use super::exchange::{Away, Exchange, Refusal, Request, Subject};
use nodedock_base::backoff::Backoff;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{ObjectName, Problem, Uid, limit};

const MISSING: &str = "node-object-missing";
const UNREADABLE: &str = "node-object-unreadable";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeFacts {
    pub name: ObjectName,
    pub uid: Uid,
}

/// Handle to the facts of the node.
#[derive(Clone)]
pub struct Facts {
    known: watch::Receiver<Option<NodeFacts>>,
    again: Arc<Notify>,
}

impl Facts {
    /// Starts the task that reads them.
    pub fn start(tasks: &Tasks, api: Arc<dyn Exchange>, node: ObjectName, conditions: Conditions) -> Self {
        let (tell, known) = watch::channel(None);
        let again = Arc::new(Notify::new());
        let reader = Reader { api, node, conditions, tell, again: Arc::clone(&again) };
        let stop = tasks.clone();
        tasks.spawn("node-facts", async move { reader.run(&stop).await });
        Self { known, again }
    }

    /// None: not known yet, or the API has no such node.
    pub fn watch(&self) -> watch::Receiver<Option<NodeFacts>> {
        self.known.clone()
    }

    /// To be called when the API server did not know the node's UID: it may have been made anew.
    pub fn read_again(&self) {
        self.again.notify_one();
    }
}

struct Reader {
    api: Arc<dyn Exchange>,
    node: ObjectName,
    conditions: Conditions,
    tell: watch::Sender<Option<NodeFacts>>,
    again: Arc<Notify>,
}

#[derive(Deserialize)]
struct Object {
    metadata: Metadata,
}

#[derive(Deserialize)]
struct Metadata {
    name: String,
    uid: Uid,
}

impl Reader {
    async fn run(&self, tasks: &Tasks) {
        let mut backoff = Backoff::new(limit::NODE_READ_MIN, limit::NODE_READ_MAX);
        loop {
            let well = tokio::select! {
                // A read that is dropped had no effect.
                () = tasks.stopped() => return,
                well = self.read() => well,
            };
            let began = Instant::now();
            let delay = if well { limit::NODE_READ_PERIOD } else { backoff.delay() };
            if well {
                backoff.reset();
            }
            tokio::select! {
                () = tasks.stopped() => return,
                () = sleep_until(began + delay) => {}
                // However many ask, the object is read at most so often.
                () = self.asked(began + limit::NODE_READ_MIN) => {}
            }
        }
    }

    async fn asked(&self, not_before: Instant) {
        self.again.notified().await;
        sleep_until(not_before).await;
    }

    /// False: to be tried again soon.
    async fn read(&self) -> bool {
        let subject = Subject { group: "", resource: "nodes", kind: "Node", name: self.node.as_str() };
        let request = Request::get(format!("/api/v1/nodes/{}", self.node));
        let read = match self.api.exchange(request).await {
            Ok(answer) => answer.object(subject).and_then(|body| self.facts(&body)),
            Err(away) => Err(away.into()),
        };
        let (code, words) = match read {
            Ok(facts) => {
                self.publish(Some(facts));
                self.conditions.clear(MISSING, self.node.as_str());
                self.conditions.clear(UNREADABLE, self.node.as_str());
                return true;
            }
            Err(Refusal::Missing) => {
                self.publish(None);
                let words = format!(
                    "the API server has no Node object {}: no slices are published until it is there; is the node's name right?",
                    self.node
                );
                (MISSING, words)
            }
            Err(other) => (UNREADABLE, format!("the Node object {} cannot be read: {other}", self.node)),
        };
        let other = if code == MISSING { UNREADABLE } else { MISSING };
        self.conditions.clear(other, self.node.as_str());
        self.conditions.set(self.node.as_str(), Problem::unavailable(code, words));
        false
    }

    fn facts(&self, body: &[u8]) -> Result<NodeFacts, Refusal> {
        let object: Object =
            serde_json::from_slice(body).map_err(|error| Away::new(format!("it is not a Node: {error}")))?;
        if object.metadata.name != self.node.as_str() {
            return Err(Away::new("the answer is about another node").into());
        }
        Ok(NodeFacts { name: self.node.clone(), uid: object.metadata.uid })
    }

    fn publish(&self, now: Option<NodeFacts>) {
        self.tell.send_if_modified(|known| {
            if *known == now {
                return false;
            }
            if let (Some(before), Some(now)) = (&known, &now) {
                tracing::warn!(before = %before.uid, now = %now.uid, "the Node object was made anew");
            }
            *known = now;
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use serde_json::json;

    use super::super::exchange::tests::{Scripted, failure, json as answer};
    use super::*;

    const NODE: Subject<'_> = Subject { group: "", resource: "nodes", kind: "Node", name: "node-1" };

    fn node(uid: &str) -> serde_json::Value {
        json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": "node-1", "uid": uid}})
    }

    fn name() -> ObjectName {
        ObjectName::new("node-1").unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_is_missing_is_said_and_found_later_and_one_made_anew_is_noticed() {
        let uid = Arc::new(Mutex::new(None::<&str>));
        let now = Arc::clone(&uid);
        let api = Arc::new(Scripted::new(move |_: &Request| match *now.lock().unwrap() {
            Some("away") => Err(Away::new("no route")),
            Some(uid) => Ok(answer(200, &node(uid))),
            None => Ok(failure(404, "NotFound", NODE)),
        }));
        let (tasks, conditions) = (Tasks::new(), Conditions::default());
        let facts = Facts::start(&tasks, api.clone(), name(), conditions.clone());
        let mut known = facts.watch();
        // The clock is paused: it goes on when the reader waits.
        let a_while = limit::NODE_READ_MIN * 2;
        tokio::time::sleep(a_while).await;
        assert!((2..=3).contains(&api.asked().len()));
        assert_eq!(conditions.list()[0].problem.code, MISSING);
        *uid.lock().unwrap() = Some("uid-a");
        known.wait_for(|facts| facts.as_ref().is_some_and(|f| f.uid.as_str() == "uid-a")).await.unwrap();
        tokio::time::sleep(a_while).await;
        assert!(conditions.list().is_empty());

        // The facts stand while nobody answers, and that is a condition.
        *uid.lock().unwrap() = Some("away");
        facts.read_again();
        tokio::time::sleep(a_while).await;
        assert_eq!(conditions.list()[0].problem.code, UNREADABLE);
        assert!(known.borrow().is_some());

        *uid.lock().unwrap() = Some("uid-b");
        known.wait_for(|facts| facts.as_ref().is_some_and(|f| f.uid.as_str() == "uid-b")).await.unwrap();
        assert!(tasks.drain(limit::DRAIN).await);
    }
}
