//! The node's object in the API: its name and UID, which owners of slices and subjects of events need.
//!
//! Read at the start, every few minutes, and when a write says that an owner does not exist. While the API server is unreachable the
//! last known facts count; when it says that there is no such node there are none.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

use super::client::{ApiError, ErrorKind, KubeClient};
use nodedock_base::backoff::Backoff;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{ObjectName, Problem, ProblemCode, Uid};

/// Interval of reads of the Node object; the backoff after a failure is from the second to the third.
pub(crate) const NODE_READ_PERIOD: Duration = Duration::from_secs(600);
pub(crate) const NODE_READ_MIN: Duration = Duration::from_secs(1);
pub(crate) const NODE_READ_MAX: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeFacts {
    pub name: ObjectName,
    pub uid: Uid,
}

/// Handle to the facts of the node.
#[derive(Clone)]
pub struct Facts {
    facts: watch::Receiver<Option<NodeFacts>>,
    again: Arc<Notify>,
}

impl Facts {
    /// Starts the task that reads them.
    pub fn start(
        tasks: &Tasks,
        client: &KubeClient,
        node: ObjectName,
        conditions: Conditions,
    ) -> Self {
        let (publish, facts) = watch::channel(None);
        let again = Arc::new(Notify::new());
        let reader = Reader {
            api: Api::all(client.client()),
            node,
            conditions,
            publish,
            again: Arc::clone(&again),
        };
        // A read that is dropped had no effect.
        tasks.spawn_until_stopped("node-facts", async move { reader.run().await });
        Self { facts, again }
    }

    /// Facts that the caller reads.
    pub fn given(facts: watch::Receiver<Option<NodeFacts>>) -> Self {
        Self {
            facts,
            again: Arc::default(),
        }
    }

    /// None: not known yet, or the API has no such node.
    pub fn watch(&self) -> watch::Receiver<Option<NodeFacts>> {
        self.facts.clone()
    }

    /// Reads the object again soon. For callers to whom the API server did not know the node's UID: the object may be a new one.
    pub fn read_again(&self) {
        self.again.notify_one();
    }
}

struct Reader {
    api: Api<Node>,
    node: ObjectName,
    conditions: Conditions,
    publish: watch::Sender<Option<NodeFacts>>,
    again: Arc<Notify>,
}

impl Reader {
    async fn run(&self) {
        let mut backoff = Backoff::new(NODE_READ_MIN, NODE_READ_MAX);
        loop {
            let read = self.read().await;
            let began = Instant::now();
            let delay = match self.report(read) {
                true => {
                    backoff.reset();
                    NODE_READ_PERIOD
                }
                false => backoff.delay(),
            };
            tokio::select! {
                () = sleep_until(began + delay) => {}
                // However many ask, the object is read at most so often.
                () = self.asked(began + NODE_READ_MIN) => {}
            }
        }
    }

    async fn asked(&self, not_before: Instant) {
        self.again.notified().await;
        sleep_until(not_before).await;
    }

    async fn read(&self) -> Result<NodeFacts, ApiError> {
        let metadata = self.api.get_metadata(self.node.as_str()).await?.metadata;
        if metadata.name.as_deref() != Some(self.node.as_str()) {
            return Err(odd("the answer is about another node"));
        }
        let uid =
            Uid::new(metadata.uid.unwrap_or_default()).map_err(|error| odd(&error.to_string()))?;
        Ok(NodeFacts {
            name: self.node.clone(),
            uid,
        })
    }

    /// Returns whether the object was read. Otherwise it is to be read again soon.
    fn report(&self, read: Result<NodeFacts, ApiError>) -> bool {
        let node = self.node.as_str();
        let (is_read, mut missing, mut unreadable) = (read.is_ok(), None, None);
        match read {
            Ok(facts) => self.publish(Some(facts)),
            Err(error) if error.is_missing(node) => {
                self.publish(None);
                let words = format!(
                    "the API server has no Node object {node}: no slices are published until it exists; is the node's name right?"
                );
                missing = Some(Problem::unavailable(ProblemCode::NodeObjectMissing, words));
            }
            Err(error) => {
                let words = format!("the Node object {node} cannot be read: {error}");
                unreadable = Some(Problem::unavailable(
                    ProblemCode::NodeObjectUnreadable,
                    words,
                ));
            }
        }
        self.conditions
            .update(ProblemCode::NodeObjectMissing, node, missing);
        self.conditions
            .update(ProblemCode::NodeObjectUnreadable, node, unreadable);
        is_read
    }

    fn publish(&self, now: Option<NodeFacts>) {
        self.publish.send_if_modified(|known| {
            if *known == now {
                return false;
            }
            if let (Some(before), Some(now)) = (&known, &now) {
                tracing::warn!(before = %before.uid, now = %now.uid, "the Node object was replaced");
            }
            *known = now;
            true
        });
    }
}

fn odd(what: &str) -> ApiError {
    ApiError::new(ErrorKind::NotKubernetes, what)
}

#[cfg(test)]
mod tests {
    use nodedock_stand_ins::api_server::{ApiServer, Fault, When};

    use super::super::client::tests::over;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn missing_or_replaced_node_is_noticed() {
        let server = Arc::new(ApiServer::start().await);
        let (tasks, conditions) = (Tasks::new(), Conditions::default());
        let name = ObjectName::new("node-1").unwrap();
        let facts = Facts::start(&tasks, &over(&server), name, conditions.clone());
        let mut known = facts.watch();
        // The clock is paused: it advances when the reader waits.
        let a_while = NODE_READ_MIN * 2;
        tokio::time::sleep(a_while).await;
        assert!((2..=3).contains(&server.requests().len()));
        assert_eq!(
            conditions.list()[0].problem.code,
            ProblemCode::NodeObjectMissing
        );
        let first = server.add_node("node-1");
        known
            .wait_for(|facts| facts.as_ref().is_some_and(|f| f.uid.as_str() == first))
            .await
            .unwrap();
        tokio::time::sleep(a_while).await;
        assert!(conditions.list().is_empty());

        // The facts count while the server is unreachable, and that is a condition.
        let fault = server.fail(Fault::Away, When::any());
        facts.read_again();
        tokio::time::sleep(a_while).await;
        assert_eq!(
            conditions.list()[0].problem.code,
            ProblemCode::NodeObjectUnreadable
        );
        assert!(known.borrow().is_some());

        server.lift(fault);
        server.delete("nodes", "", "node-1");
        let second = server.add_node("node-1");
        known
            .wait_for(|facts| facts.as_ref().is_some_and(|f| f.uid.as_str() == second))
            .await
            .unwrap();
        assert!(tasks.drain(nodedock_model::limit::DRAIN).await);
    }
}
