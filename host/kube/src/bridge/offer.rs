//! One driver as a kubelet sees it: what the services on its sockets have in common.

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::BridgeClaims;
use super::connections::Gauge;
use super::counters::Counters;
use crate::slices::PoolNames;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_base::printable::one_line;
use nodedock_base::tasks::Tasks;
use nodedock_core::registry::Registry;
use nodedock_model::limit::{BRIDGE_HEALTH_STREAMS_MAX, PROBLEM_MESSAGE_BYTES_MAX};
use nodedock_model::{DriverName, Problem};

/// A kubelet refused a driver of ours, by the driver's name.
pub(super) const REFUSED: &str = "kubelet-refused-driver";

/// What a kubelet made of a driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Registration {
    /// Nobody asked yet.
    #[default]
    Offered,
    /// A kubelet asked who it is, and did not say yet what became of it.
    Asked,
    Registered {
        since_ms: u64,
    },
    /// It is tried again by the kubelet.
    Refused {
        since_ms: u64,
        why: String,
    },
}

impl Registration {
    pub fn is_registered(&self) -> bool {
        matches!(self, Self::Registered { .. })
    }
}

/// What all drivers' services stand on.
#[derive(Clone)]
pub(super) struct Ground {
    pub(super) registry: Registry,
    pub(super) pool_names: PoolNames,
    pub(super) claims: Arc<dyn BridgeClaims>,
    pub(super) conditions: Conditions,
    pub(super) counters: Arc<Counters>,
    /// Work that goes on when its caller goes away.
    pub(super) tasks: Tasks,
    /// Until then nobody can tell a driver that is not here from one that was not looked at yet.
    pub(super) settled_at: Instant,
}

pub(super) struct Offer {
    pub(super) driver: DriverName,
    /// Where it is called.
    pub(super) endpoint: PathBuf,
    pub(super) ground: Ground,
    pub(super) health_streams: Arc<Semaphore>,
    /// To the socket of its service.
    pub(super) connections: Arc<Gauge>,
    registration: Mutex<Registration>,
}

impl Offer {
    pub(super) fn new(driver: DriverName, endpoint: PathBuf, ground: Ground) -> Self {
        Self {
            driver,
            endpoint,
            ground,
            health_streams: Arc::new(Semaphore::new(BRIDGE_HEALTH_STREAMS_MAX)),
            connections: Arc::default(),
            registration: Mutex::default(),
        }
    }

    pub(super) fn registration(&self) -> Registration {
        self.lock().clone()
    }

    /// A kubelet asks who it is. One that asks again begins anew, and a refusal stands until it says otherwise.
    pub(super) fn asked(&self) {
        let mut registration = self.lock();
        if !matches!(*registration, Registration::Refused { .. }) {
            *registration = Registration::Asked;
        }
    }

    pub(super) fn registered(&self) {
        *self.lock() = Registration::Registered { since_ms: now_ms() };
        self.ground.counters.registrations.fetch_add(1, Relaxed);
        self.ground.conditions.clear(REFUSED, self.driver.as_str());
        tracing::info!(driver = %self.driver, "registered with the kubelet");
    }

    /// Returns the kubelet's words as they are repeated.
    pub(super) fn refused(&self, why: &str) -> String {
        let why = one_line(why, PROBLEM_MESSAGE_BYTES_MAX / 2);
        self.ground.counters.refusals.fetch_add(1, Relaxed);
        let mut registration = self.lock();
        let since_ms = match &*registration {
            Registration::Refused { since_ms, .. } => *since_ms,
            _ => now_ms(),
        };
        *registration = Registration::Refused { since_ms, why: why.clone() };
        drop(registration);
        let message = format!("the kubelet does not take driver {}: {why}", self.driver);
        self.ground.conditions.set(self.driver.as_str(), Problem::unavailable(REFUSED, message));
        why
    }

    /// What was registered on a socket that is gone is no more.
    pub(super) fn offered_anew(&self) {
        *self.lock() = Registration::Offered;
        self.ground.conditions.clear(REFUSED, self.driver.as_str());
    }

    /// Whether the driver does not serve and may do so soon.
    pub(super) fn may_come(&self) -> bool {
        let Ground { registry, settled_at, .. } = &self.ground;
        registry.serving(&self.driver).is_err()
            && (registry.is_under_way(&self.driver) || Instant::now() < *settled_at)
    }

    /// Waits until the driver serves. False: it does not come in time.
    pub(super) async fn comes_within(&self, patience: Duration) -> bool {
        let registry = &self.ground.registry;
        let mut changes = registry.serving_changes();
        let until = Instant::now() + patience;
        while registry.serving(&self.driver).is_err() {
            if !self.may_come() || Instant::now() >= until {
                return false;
            }
            // What fails instead of serving is told by nobody.
            let look = (Instant::now() + LOOK_PERIOD).min(until);
            tokio::select! {
                () = self.ground.tasks.stopped() => return false,
                // A change that is not seen here is seen at the next turn.
                changed = changes.changed() => if changed.is_err() { return false },
                () = tokio::time::sleep_until(look) => {}
            }
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, Registration> {
        self.registration.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Between looks whether a driver that is waited for still may come.
const LOOK_PERIOD: Duration = Duration::from_millis(500);
