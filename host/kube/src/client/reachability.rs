//! Reachability of the API server, and the node's condition while it is unreachable.

use std::time::Duration;
use tokio::sync::watch;
use tokio::time::sleep;

use super::{API_PROBE_PERIOD, ApiError, KubeClient};
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{Problem, ProblemCode};

/// Time after which an unreachable API server is reported: during an update it is replaced within seconds.
pub(crate) const API_AWAY_NOTICE: Duration = Duration::from_secs(5);

const SUBJECT: &str = "API server";

/// Outcome of the last request.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Reachability {
    /// No request has ended yet.
    #[default]
    Unknown,
    Reachable,
    Unreachable {
        message: String,
    },
}

impl Reachability {
    fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}

/// Learns from the end of a request.
pub(super) fn learn(reachability: &watch::Sender<Reachability>, failure: Option<&ApiError>) {
    let now = match failure.filter(|error| error.is_unreachable()) {
        Some(error) => Reachability::Unreachable {
            message: error.to_string(),
        },
        None => Reachability::Reachable,
    };
    reachability.send_if_modified(|known| {
        let is_new = *known != now;
        *known = now;
        is_new
    });
}

impl KubeClient {
    /// Returns a receiver of the outcome of the last request: whether it reached the API server.
    pub fn reachability(&self) -> watch::Receiver<Reachability> {
        self.shared.reachability.subscribe()
    }

    /// Returns whether the last request did not reach the API server.
    pub fn is_unreachable(&self) -> bool {
        self.shared.reachability.borrow().is_unreachable()
    }

    /// Sets a condition while the API server is unreachable, and probes it meanwhile.
    pub fn report_reachability(&self, conditions: Conditions, tasks: &Tasks) {
        let client = self.clone();
        // A probe that is dropped has no effect.
        tasks.spawn_until_stopped("api-reachability", async move {
            let mut reachability = client.reachability();
            while reachability
                .wait_for(Reachability::is_unreachable)
                .await
                .is_ok()
            {
                tokio::select! {
                    // The client has the sender.
                    _ = reachability.wait_for(|now| !now.is_unreachable()) => {}
                    () = report(client.reachability(), &conditions) => {}
                    () = client.probe() => {}
                }
                conditions.clear(ProblemCode::ApiServerUnreachable, SUBJECT);
            }
        });
    }

    /// Sends requests, from whose ends the layer learns; never returns.
    async fn probe(&self) {
        loop {
            sleep(API_PROBE_PERIOD).await;
            let _ = self.group(self.client()).await;
        }
    }
}

/// Sets the condition, with the newest message; returns when there is no client any more.
async fn report(mut reachability: watch::Receiver<Reachability>, conditions: &Conditions) {
    sleep(API_AWAY_NOTICE).await;
    loop {
        if let Reachability::Unreachable { message } = &*reachability.borrow_and_update() {
            let problem = Problem::unavailable(ProblemCode::ApiServerUnreachable, message.clone());
            conditions.set(SUBJECT, problem);
        }
        if reachability.changed().await.is_err() {
            return;
        }
    }
}
