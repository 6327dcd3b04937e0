//! The kubelet bridge: every serving driver of ours is an ordinary plugin of a kubelet.
//!
//! For each driver that serves claims, of whatever kind, a registration socket and a socket of its service lie in the kubelet's
//! folders (`paths`). Which drivers, is decided by `offers`; `standing` opens and closes the sockets; `registration`, `dra` and
//! `health` answer on them. Sockets stay open while a driver is replaced or lost behind them. Names of drivers that were offered are
//! kept over a restart (`memory`), so that a kubelet finds them at once, before they are loaded.
//!
//! Is given claims' managers by a port and the registry; never talks to a driver, and asks nobody of anything to say who it is.
//! Extended resources of pools are offered by `plugins`.

mod asked;
mod connections;
mod convert;
mod counters;
mod dra;
mod health;
mod memory;
mod offer;
mod offers;
mod paths;
pub mod plugins;
mod registration;
mod report;
mod sockets;
mod standing;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::slices::PoolNames;
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::registry::Registry;
use nodedock_model::limit::{BRIDGE_LOOK_PERIOD, BRIDGE_SETTLE};
use nodedock_model::{DriverName, KubeletDevice, ObjectRef, Problem, Uid};

pub use counters::{CallSeconds, Counters, CountersView, OperationSeconds};
pub use offer::Registration;
pub use offers::OfferTimes;
pub use paths::RootError;

use offer::{Ground, Offer};
use offers::Offers;
use paths::Folders;
use sockets::{SocketError, make_folder};
use standing::Standing;

/// The kubelet's folders are not as they should be, by the kubelet's root.
const NO_FOLDER: &str = "kubelet-folder";
/// The names of drivers that are offered cannot be kept, by the file.
const NO_MEMORY: &str = "bridge-memory";

/// What the bridge asks of the claim manager.
#[async_trait]
pub trait BridgeClaims: Send + Sync {
    /// Prepares a claim with one driver. May be repeated at any time.
    async fn prepare(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        request_id: Arc<str>,
    ) -> Result<Vec<KubeletDevice>, Problem>;

    /// Hears of a claim that was not prepared, and why, as the kubelet is told.
    async fn refused(&self, claim: &ObjectRef, problem: &Problem);

    /// Gives a claim up with one driver. What is not known is success.
    async fn unprepare(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        request_id: Arc<str>,
    ) -> Result<(), Problem>;

    /// Drivers of which a kubelet holds claims. Asked once a second where a driver is gone: it touches nothing slow.
    fn held_drivers(&self) -> BTreeSet<DriverName>;
}

/// When things are looked at, and given up.
#[derive(Debug, Clone, Copy)]
pub struct BridgeTimes {
    /// Between two looks whether all sockets are there.
    pub look_period: Duration,
    /// After the start for so long a driver that nobody knows may still come.
    pub settle: Duration,
    pub offers: OfferTimes,
}

impl Default for BridgeTimes {
    fn default() -> Self {
        Self { look_period: BRIDGE_LOOK_PERIOD, settle: BRIDGE_SETTLE, offers: OfferTimes::default() }
    }
}

/// What the bridge is built of.
pub struct BridgeParts {
    /// The kubelet's root. It has to be the path that the kubelet itself has: it is told where sockets are.
    pub root: PathBuf,
    /// Tells the sockets of this daemon from those of another at the same kubelet: the UID of its pod.
    pub instance: Option<Uid>,
    /// The folder in which native plugins register with us.
    pub own_registry: PathBuf,
    /// Where names of drivers are kept over a restart; its folder is there.
    pub memory: PathBuf,
    /// More drivers to offer from the start: those of claims that are held.
    pub remembered: Vec<DriverName>,
    pub registry: Registry,
    /// What drivers' pools are called in the API.
    pub pool_names: PoolNames,
    pub claims: Arc<dyn BridgeClaims>,
    pub conditions: Conditions,
    pub times: BridgeTimes,
    pub tasks: Tasks,
}

/// Why there can be no bridge.
#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    #[error(transparent)]
    Root(#[from] RootError),
    #[error(
        "{0:?} is the folder in which plugins register with this daemon, and below the kubelet's root as well: every driver would \
         be offered to ourselves; choose another --root or --kubelet-root"
    )]
    OwnFolder(PathBuf),
}

/// How a driver stands with the kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverBridgeStatus {
    pub driver: DriverName,
    pub registration: Registration,
    /// Both of its sockets are open.
    pub is_open: bool,
    /// Open connections to the socket of its service: a kubelet keeps one.
    pub connections: u64,
    /// Why its sockets are not open, or cannot be made anew.
    pub problem: Option<String>,
    /// None: there is no name that fits.
    pub sockets: Option<DriverSockets>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverSockets {
    pub registration: PathBuf,
    pub service: PathBuf,
}

/// Handle to the bridge.
#[derive(Clone)]
pub struct Bridge(Arc<Inner>);

struct Inner {
    parts: BridgeParts,
    /// Stopped when nothing is to change any more.
    changing: Tasks,
    folders: Folders,
    counters: Arc<Counters>,
    shown: Mutex<Vec<Shown>>,
    /// Counts the looks.
    looks: watch::Sender<u64>,
}

/// A driver as the keeper left it, and what goes on with it since.
struct Shown {
    status: DriverBridgeStatus,
    offer: Option<Arc<Offer>>,
}

impl Shown {
    fn now(&self) -> DriverBridgeStatus {
        let mut status = self.status.clone();
        if let Some(offer) = &self.offer {
            (status.registration, status.connections) = (offer.registration(), offer.connections.open());
        }
        status
    }
}

impl Bridge {
    /// Refuses what can never work.
    pub fn new(parts: BridgeParts) -> Result<Self, BridgeError> {
        let folders = Folders::new(parts.root.clone(), parts.instance.clone())?;
        if is_one_folder(&folders.registry(), &parts.own_registry) {
            return Err(BridgeError::OwnFolder(parts.own_registry));
        }
        let (changing, counters, shown) = (parts.tasks.child(), Arc::default(), Mutex::default());
        let looks = watch::Sender::new(0);
        Ok(Self(Arc::new(Inner { parts, changing, folders, counters, shown, looks })))
    }

    /// Offers drivers until the tasks stop. Sockets of drivers that were offered before are opened at once.
    pub fn start(&self) {
        let keeper = Keeper::new(self.0.clone());
        self.0.parts.tasks.spawn("bridge", keeper.run());
    }

    /// Leaves everything as it stands until the tasks stop: sockets stay open whatever becomes of their drivers here.
    pub fn hold(&self) {
        self.0.changing.stop();
    }

    /// Drivers that are offered, by name, as they stand now.
    pub fn status(&self) -> Vec<DriverBridgeStatus> {
        self.0.shown().iter().map(Shown::now).collect()
    }

    /// Changes whenever it was looked whether all sockets are as they should be, and what was not was made so.
    pub fn looks(&self) -> watch::Receiver<u64> {
        self.0.looks.subscribe()
    }

    pub fn counters(&self) -> Arc<Counters> {
        self.0.counters.clone()
    }
}

impl Inner {
    fn shown(&self) -> MutexGuard<'_, Vec<Shown>> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether one is the other, or in it: both are watched with all that is below. As far as they are there, links count.
fn is_one_folder(one: &Path, other: &Path) -> bool {
    let resolved = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let (one, other) = (resolved(one), resolved(other));
    one.starts_with(&other) || other.starts_with(&one)
}

/// Offers drivers: the one task that makes and removes sockets.
struct Keeper {
    inner: Arc<Inner>,
    ground: Ground,
    offers: Offers,
    standing: BTreeMap<DriverName, Result<Standing, String>>,
    /// As they were kept last.
    kept: Option<BTreeSet<DriverName>>,
}

impl Keeper {
    fn new(inner: Arc<Inner>) -> Self {
        let parts = &inner.parts;
        let now = Instant::now();
        let ground = Ground {
            registry: parts.registry.clone(),
            pool_names: parts.pool_names.clone(),
            claims: parts.claims.clone(),
            conditions: parts.conditions.clone(),
            counters: inner.counters.clone(),
            tasks: parts.tasks.clone(),
            settled_at: now + parts.times.settle,
        };
        let remembered = memory::load(&parts.memory).unwrap_or_else(|error| {
            tracing::warn!(error = chain(&error), "drivers are offered when they serve");
            Vec::new()
        });
        let remembered = remembered.into_iter().chain(parts.remembered.iter().cloned());
        let offers = Offers::new(parts.times.offers, remembered, now);
        Self { ground, offers, standing: BTreeMap::new(), kept: None, inner }
    }

    async fn run(mut self) {
        let (stopped, registry) = (self.ground.tasks.stopped(), self.ground.registry.clone());
        let held = self.inner.changing.stopped();
        let (mut serving, mut freed) = (registry.serving_changes(), registry.freed_changes());
        tokio::pin!(stopped, held);
        loop {
            serving.mark_unchanged();
            freed.mark_unchanged();
            self.look().await;
            tokio::select! {
                () = &mut held => {
                    stopped.await;
                    break;
                }
                // A change that is not seen here is seen at the next look, whatever it is.
                _ = serving.changed() => {}
                _ = freed.changed() => {}
                () = tokio::time::sleep(self.inner.parts.times.look_period) => {}
            }
        }
        self.close().await;
    }

    /// Makes what is offered as it should be.
    async fn look(&mut self) {
        let (here, claims) = (self.ground.registry.names(), &self.ground.claims);
        let offered = self.offers.turn(&here, || claims.held_drivers(), Instant::now());
        self.withdraw(&offered);
        if self.folders_are_there() {
            for driver in &offered {
                self.keep(driver).await;
            }
        }
        self.tell();
        self.remember(offered).await;
        self.inner.looks.send_modify(|count| *count += 1);
    }

    fn withdraw(&mut self, offered: &BTreeSet<DriverName>) {
        let gone = self.standing.extract_if(.., |driver, _| !offered.contains(driver));
        for (driver, standing) in gone {
            tracing::info!(%driver, "offered to the kubelet no more");
            match standing {
                Ok(standing) => {
                    let closed = standing.withdraw();
                    self.ground.tasks.spawn("bridge-withdrawn", standing::drained(closed));
                }
                Err(_) => self.ground.conditions.clear(standing::NO_SOCKET, driver.as_str()),
            }
        }
    }

    /// The kubelet makes them as well, whoever comes first. Its root it has to make itself: there may be no kubelet here.
    fn folders_are_there(&self) -> bool {
        let folders = &self.inner.folders;
        let root = folders.root();
        let made = match std::fs::metadata(root) {
            Err(source) => Err(SocketError::Look { path: root.to_owned(), source }),
            Ok(_) => make_folder(&folders.registry()).and_then(|()| make_folder(&folders.plugins())),
        };
        let (conditions, subject) = (&self.ground.conditions, root.to_string_lossy());
        match &made {
            Ok(()) => conditions.clear(NO_FOLDER, &subject),
            Err(error) => {
                let message = format!("no driver can be offered to the kubelet: {}", chain(error));
                conditions.set(&subject, Problem::unavailable(NO_FOLDER, message));
            }
        }
        made.is_ok()
    }

    async fn keep(&mut self, driver: &DriverName) {
        if !self.standing.contains_key(driver) {
            let standing = self.stand_up(driver);
            self.standing.insert(driver.clone(), standing);
        }
        if let Some(Ok(standing)) = self.standing.get_mut(driver) {
            standing.keep().await;
        }
    }

    /// The error says why no name fits; nothing changes that.
    fn stand_up(&self, driver: &DriverName) -> Result<Standing, String> {
        match self.inner.folders.of(driver) {
            Ok(paths) => {
                let offer = Offer::new(driver.clone(), paths.service.clone(), self.ground.clone());
                Ok(Standing::new(offer, paths))
            }
            Err(too_long) => {
                let why = too_long.to_string();
                let problem = Problem::invalid(standing::NO_SOCKET, &why);
                self.ground.conditions.set(driver.as_str(), problem);
                Err(why)
            }
        }
    }

    /// Shows how the drivers stand.
    fn tell(&self) {
        *self.inner.shown() =
            self.standing.iter().map(|(driver, standing)| shown(driver, standing)).collect();
    }

    async fn remember(&mut self, offered: BTreeSet<DriverName>) {
        if self.kept.as_ref() == Some(&offered) {
            return;
        }
        let (path, names) = (self.inner.parts.memory.clone(), offered.clone());
        let saved = tokio::task::spawn_blocking(move || memory::save(&path, &names)).await;
        let (conditions, subject) = (&self.ground.conditions, self.inner.parts.memory.to_string_lossy());
        match saved {
            Ok(Ok(())) => {
                self.kept = Some(offered);
                conditions.clear(NO_MEMORY, &subject);
            }
            Ok(Err(error)) => {
                let message =
                    format!("after a restart drivers are offered when they serve: {}", chain(&error));
                conditions.set(&subject, Problem::unavailable(NO_MEMORY, message));
            }
            // The runtime ends.
            Err(_) => {}
        }
    }

    /// Closes everything, every registration before the services.
    async fn close(mut self) {
        let mut standing: Vec<_> = self.standing.values_mut().flatten().collect();
        let mut closed: Vec<_> = standing.iter_mut().map(|standing| standing.close_registration()).collect();
        closed.extend(standing.iter_mut().map(|standing| standing.close_service()));
        self.inner.shown().clear();
        self.inner.looks.send_modify(|count| *count += 1);
        standing::drained(closed.into_iter().flatten().collect()).await;
    }
}

fn shown(driver: &DriverName, standing: &Result<Standing, String>) -> Shown {
    let mut status = DriverBridgeStatus {
        driver: driver.clone(),
        registration: Registration::Offered,
        is_open: false,
        connections: 0,
        problem: None,
        sockets: None,
    };
    match standing {
        Ok(standing) => {
            let (view, paths) = (standing.view(), standing.paths());
            (status.is_open, status.problem) = (view.is_open, view.problem);
            let (registration, service) = (paths.registration.clone(), paths.service.clone());
            status.sockets = Some(DriverSockets { registration, service });
            Shown { status, offer: Some(standing.offer().clone()) }
        }
        Err(why) => {
            status.problem = Some(why.clone());
            Shown { status, offer: None }
        }
    }
}
