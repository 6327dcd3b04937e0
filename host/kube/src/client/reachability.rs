//! Whether the API server is reachable: a condition of the node while it is not.

use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{ApiError, KubeClient};
use crate::client::API_PROBE_PERIOD;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{Problem, ProblemCode};

/// Time after which an unreachable API server is reported: during an update it is replaced within seconds.
pub(crate) const API_AWAY_NOTICE: Duration = Duration::from_secs(5);

const SUBJECT: &str = "API server";

/// What the last request found.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Reachability {
    /// No request has ended yet.
    #[default]
    Unknown,
    Reachable,
    Unreachable {
        since: Instant,
        message: String,
    },
}

impl Reachability {
    fn after(&self, failure: Option<&ApiError>, now: Instant) -> Self {
        let Some(error) = failure.filter(|error| error.is_unreachable()) else { return Self::Reachable };
        let since = match self {
            Self::Unreachable { since, .. } => *since,
            Self::Unknown | Self::Reachable => now,
        };
        Self::Unreachable { since, message: error.to_string() }
    }
}

/// Learns from the end of a request.
pub(super) fn learn(reachability: &watch::Sender<Reachability>, failure: Option<&ApiError>) {
    reachability.send_if_modified(|known| {
        let next = known.after(failure, Instant::now());
        let is_new = *known != next;
        *known = next;
        is_new
    });
}

impl KubeClient {
    /// Sets a condition while the API server is unreachable, and probes it meanwhile.
    pub fn report_reachability(&self, conditions: Conditions, tasks: &Tasks) {
        let client = self.clone();
        // A probe that is dropped has no effect.
        tasks.spawn_until_stopped("api-reachability", async move { follow(client, &conditions).await });
    }
}

async fn follow(client: KubeClient, conditions: &Conditions) {
    let mut reachability = client.reachability();
    let mut probe_at = None;
    loop {
        let now = Instant::now();
        let next = match &*reachability.borrow_and_update() {
            Reachability::Unknown | Reachability::Reachable => {
                conditions.clear(ProblemCode::ApiServerUnreachable, SUBJECT);
                probe_at = None;
                None
            }
            Reachability::Unreachable { since, message } => {
                let due = *since + API_AWAY_NOTICE;
                if due <= now {
                    conditions.set(
                        SUBJECT,
                        Problem::unavailable(ProblemCode::ApiServerUnreachable, message.clone()),
                    );
                }
                let probe = *probe_at.get_or_insert(now + API_PROBE_PERIOD);
                Some(if due > now { probe.min(due) } else { probe })
            }
        };
        let changed = match next {
            None => Some(reachability.changed().await),
            Some(at) => tokio::time::timeout_at(at, reachability.changed()).await.ok(),
        };
        if changed.is_some_and(|changed| changed.is_err()) {
            return;
        }
        if probe_at.is_some_and(|at| at <= Instant::now()) {
            // The layer learns from its end.
            let _ = client.group(client.client()).await;
            probe_at = Some(Instant::now() + API_PROBE_PERIOD);
        }
    }
}
