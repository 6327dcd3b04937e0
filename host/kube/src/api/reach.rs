//! Whether the API server is there: a condition of the node while it is not.

use tokio::sync::watch;
use tokio::time::Instant;

use super::Api;
use super::error::ApiError;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{Problem, limit};

/// The condition's code, and what it is about.
pub(super) const UNREACHABLE: &str = "api-server-unreachable";
const SUBJECT: &str = "API server";

/// What the last request found.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Reach {
    /// Nothing was asked yet.
    #[default]
    Unknown,
    Here,
    Away {
        since: Instant,
        words: String,
    },
}

impl Reach {
    /// None: nothing new.
    fn after(&self, failure: Option<&ApiError>, now: Instant) -> Option<Self> {
        match (self, failure.filter(|error| error.is_away())) {
            (Self::Here, None) => None,
            (_, None) => Some(Self::Here),
            (Self::Away { since, .. }, Some(error)) => {
                Some(Self::Away { since: *since, words: error.to_string() })
            }
            (_, Some(error)) => Some(Self::Away { since: now, words: error.to_string() }),
        }
    }
}

/// Learns from a request's end.
pub(super) fn learn(reach: &watch::Sender<Reach>, failure: Option<&ApiError>) {
    reach.send_if_modified(|reach| match reach.after(failure, Instant::now()) {
        Some(next) => {
            *reach = next;
            true
        }
        None => false,
    });
}

/// Sets and clears the condition, and asks by itself while the API server is away.
pub(super) fn tell(api: Api, conditions: Conditions, tasks: &Tasks) {
    let stopped = tasks.stopped();
    tasks.spawn("api-reach", async move {
        tokio::select! {
            // Nothing is under way that would be missed.
            () = stopped => {}
            () = follow(api, &conditions) => {}
        }
    });
}

async fn follow(api: Api, conditions: &Conditions) {
    let mut reach = api.reach();
    let mut probe_at = None;
    loop {
        let now = Instant::now();
        let next = match &*reach.borrow_and_update() {
            Reach::Unknown | Reach::Here => {
                conditions.clear(UNREACHABLE, SUBJECT);
                probe_at = None;
                None
            }
            Reach::Away { since, words } => {
                let due = *since + limit::API_AWAY_NOTICE;
                if due <= now {
                    conditions.set(SUBJECT, Problem::unavailable(UNREACHABLE, words.clone()));
                }
                let probe = *probe_at.get_or_insert(now + limit::API_PROBE_PERIOD);
                Some(if due > now { probe.min(due) } else { probe })
            }
        };
        let changed = match next {
            None => Some(reach.changed().await),
            Some(at) => tokio::time::timeout_at(at, reach.changed()).await.ok(),
        };
        if changed.is_some_and(|changed| changed.is_err()) {
            return;
        }
        if probe_at.is_some_and(|at| at <= Instant::now()) {
            // Its end is what the next round finds.
            let _ = api.probe().await;
            probe_at = Some(Instant::now() + limit::API_PROBE_PERIOD);
        }
    }
}
