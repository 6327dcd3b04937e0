//! The bridge with a registry of drivers that are played, and on its sockets clients that do what a kubelet does.

mod claims;
mod health;
mod sockets;

use std::collections::VecDeque;
use std::future::Future;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tonic::transport::{Channel, Endpoint, Uri};

use super::*;
use nodedock_base::changes::Changes;
use nodedock_core::driver::{Call, ClaimDriver, Driver, DriverIdentity, Outcomes, Published};
use nodedock_core::registry::DriverState;
use nodedock_model::{
    Device, DeviceHealth, DeviceName, DriverClaim, DriverKind, HealthState, Inventory, LiveClaim, Pool,
    PoolName, PreparedClaim,
};
use nodedock_native::grpc::{Registrar, StepTimes};

const GPU: &str = "gpu.example.com";
const NIC: &str = "nic.example.com";
/// Longer than any of it takes, and shorter than a person waits.
const PATIENCE: Duration = Duration::from_secs(20);

fn name(driver: &str) -> DriverName {
    DriverName::new(driver).unwrap()
}

/// What every test stands on: a kubelet's root, and what the daemon has.
struct Home {
    dir: tempfile::TempDir,
    registry: Registry,
    claims: Arc<PlayedClaims>,
}

impl Home {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("kubelet")).unwrap();
        let registry = Registry::new(Changes::default());
        let claims = Arc::new(PlayedClaims::new(registry.clone()));
        Self { dir, registry, claims }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("kubelet")
    }

    fn registration(&self, driver: &str) -> PathBuf {
        self.root().join("plugins_registry").join(format!("{driver}-reg.sock"))
    }

    fn service(&self, driver: &str) -> PathBuf {
        self.root().join("plugins").join(driver).join("dra.sock")
    }

    fn parts(&self) -> BridgeParts {
        let offers = OfferTimes {
            gone: Duration::from_millis(20),
            held: Duration::from_millis(20),
            remembered: PATIENCE * 2,
        };
        BridgeParts {
            root: self.root(),
            instance: None,
            own_registry: self.dir.path().join("ours"),
            memory: self.dir.path().join("offered-drivers"),
            remembered: Vec::new(),
            registry: self.registry.clone(),
            pool_names: crate::slices::PoolNames::Plain,
            claims: self.claims.clone(),
            conditions: Conditions::default(),
            times: BridgeTimes { look_period: Duration::from_millis(10), settle: Duration::ZERO, offers },
            tasks: Tasks::new(),
        }
    }

    fn start(&self) -> Running {
        Running::start(self.parts())
    }

    fn instance(&self, uid: &str) -> Running {
        let memory = self.dir.path().join(format!("offered-drivers-{uid}"));
        Running::start(BridgeParts { instance: Some(Uid::new(uid).unwrap()), memory, ..self.parts() })
    }

    /// A driver begins to serve; a later one of the name replaces it.
    fn serve(&self, driver: &str) -> tokio::sync::watch::Sender<Arc<Published>> {
        self.show(driver, DriverState::Serving);
        let identity = DriverIdentity {
            name: name(driver),
            kind: DriverKind::Wasm,
            version: "1".into(),
            digest: String::new(),
            source: source(driver),
            summary: String::new(),
        };
        let (published, inventory) = tokio::sync::watch::channel(Arc::default());
        let (claims, inventory) = (Some(Arc::new(Uncalled) as _), Some(inventory));
        let driver = Driver { identity: Arc::new(identity), claims, inventory };
        self.registry.serve(&driver.identity.source.clone(), driver).unwrap();
        published
    }

    fn show(&self, driver: &str, state: DriverState) {
        let shown = name(driver);
        self.registry.update(DriverKind::Wasm, &source(driver), |view| {
            (view.name, view.state) = (Some(shown), state);
        });
    }
}

fn source(driver: &str) -> String {
    format!("{driver}.wasm")
}

/// A bridge that was started.
struct Running {
    bridge: Bridge,
    conditions: Conditions,
    tasks: Tasks,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

impl Running {
    fn start(parts: BridgeParts) -> Self {
        let (conditions, tasks) = (parts.conditions.clone(), parts.tasks.clone());
        let bridge = Bridge::new(parts).unwrap();
        bridge.start();
        Self { bridge, conditions, tasks }
    }

    /// Waits until it is so, looking whenever the bridge has.
    async fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let mut looks = self.bridge.looks();
        let arrived = async {
            while !is_so(self) {
                looks.changed().await.unwrap();
            }
        };
        if tokio::time::timeout(PATIENCE, arrived).await.is_err() {
            panic!("{what}: {:#?} {:#?}", self.bridge.status(), self.conditions.list());
        }
    }

    async fn open(&self, driver: &str) {
        self.until("open", |this| this.status(driver).is_some_and(|status| status.is_open)).await;
    }

    /// Two looks from now: what was there before was seen.
    async fn looked(&self) {
        let mut looks = self.bridge.looks();
        for _ in 0..2 {
            looks.changed().await.unwrap();
        }
    }

    fn status(&self, driver: &str) -> Option<DriverBridgeStatus> {
        self.bridge.status().into_iter().find(|status| status.driver.as_str() == driver)
    }

    /// The words of a condition.
    fn condition(&self, code: &str) -> Option<String> {
        let found = self.conditions.list().into_iter().find(|found| found.problem.code == code);
        found.map(|found| format!("{}: {}", found.subject, found.problem.message))
    }

    async fn condition_comes(&self, code: &str) -> String {
        self.until(code, |this| this.condition(code).is_some()).await;
        self.condition(code).unwrap()
    }

    async fn condition_goes(&self, code: &str) {
        self.until(code, |this| this.condition(code).is_none()).await;
    }

    async fn drain(&self) {
        assert!(self.tasks.drain(PATIENCE).await, "something was still under way");
    }
}

/// Within what a person waits for.
async fn soon<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("it takes too long")
}

async fn channel(socket: &Path) -> Channel {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap()
}

async fn registrar(home: &Home, driver: &str) -> Registrar {
    Registrar::dial(&home.registration(driver), StepTimes::default()).await.unwrap()
}

/// A driver that is called by nobody here.
struct Uncalled;

#[async_trait]
impl ClaimDriver for Uncalled {
    async fn prepare(&self, _: &Call, _: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        unreachable!("no north face talks to a driver")
    }

    async fn unprepare(&self, _: &Call, _: &[LiveClaim]) -> Outcomes<()> {
        unreachable!("no north face talks to a driver")
    }
}

/// A claim manager that does what the claims' names say.
struct PlayedClaims {
    registry: Registry,
    /// `prepare NAME` and `unprepare NAME` as they began, and `done NAME`.
    told: Mutex<VecDeque<String>>,
    telling: Notify,
    /// Lets claims go on that wait.
    go: Notify,
    held: Mutex<BTreeSet<DriverName>>,
    /// Claims that were not prepared, with the problem's code.
    refusals: Mutex<Vec<String>>,
}

impl PlayedClaims {
    fn new(registry: Registry) -> Self {
        let (told, telling, go, held, refusals) = Default::default();
        Self { registry, told, telling, go, held, refusals }
    }

    fn tell(&self, what: String) {
        self.told.lock().unwrap().push_back(what);
        self.telling.notify_one();
    }

    /// The next that was told.
    async fn event(&self) -> String {
        soon(async {
            loop {
                if let Some(told) = self.told.lock().unwrap().pop_front() {
                    return told;
                }
                self.telling.notified().await;
            }
        })
        .await
    }

    fn hold(&self, drivers: &[&str]) {
        *self.held.lock().unwrap() = drivers.iter().map(|driver| name(driver)).collect();
    }

    async fn act(&self, driver: &DriverName, claim: &ObjectRef) -> Result<(), Problem> {
        match claim.name.as_str() {
            "held" => Err(Problem::conflict("device-held", "claim default/a holds it")),
            "breaks" => panic!("story"),
            "waits" => {
                self.go.notified().await;
                Ok(())
            }
            "calls" => self.registry.serving(driver).map(drop),
            "missed" => {
                let found = self.registry.serving(driver).map(drop);
                if found.is_err() {
                    self.go.notified().await;
                }
                found
            }
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl BridgeClaims for PlayedClaims {
    async fn prepare(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        _: Arc<str>,
    ) -> Result<Vec<KubeletDevice>, Problem> {
        self.tell(format!("prepare {}", claim.name));
        self.act(driver, claim).await?;
        self.tell(format!("done {}", claim.name));
        let device = KubeletDevice {
            requests: vec!["request".into()],
            pool: PoolName::new("pool").unwrap(),
            device: DeviceName::new("device").unwrap(),
            cdi: vec![format!("{driver}/claim={}", claim.uid)],
            share_id: Some("share".into()),
        };
        Ok(if claim.name.as_str() == "none" { Vec::new() } else { vec![device] })
    }

    async fn refused(&self, claim: &ObjectRef, problem: &Problem) {
        self.refusals.lock().unwrap().push(format!("{} {}", claim.name, problem.code));
    }

    async fn unprepare(&self, driver: &DriverName, claim: &ObjectRef, _: Arc<str>) -> Result<(), Problem> {
        self.tell(format!("unprepare {}", claim.name));
        self.act(driver, claim).await
    }

    fn held_drivers(&self) -> BTreeSet<DriverName> {
        self.held.lock().unwrap().clone()
    }
}

/// Devices of one pool, each healthy, unhealthy or of no state, with words.
fn published(devices: &[(&str, Option<bool>, &str)]) -> Arc<Published> {
    let pool = PoolName::new("pool").unwrap();
    let names = devices.iter().map(|(device, _, _)| (DeviceName::new(device).unwrap(), Device::default()));
    let listed = Pool { devices: names.collect(), ..Pool::default() };
    let said = |(device, healthy, words): &(&str, Option<bool>, &str)| {
        let state = match (*healthy)? {
            true => HealthState::Healthy,
            false => HealthState::Unhealthy,
        };
        let key = (pool.clone(), DeviceName::new(device).unwrap());
        Some((key, DeviceHealth { state, message: (*words).to_owned() }))
    };
    let health = devices.iter().filter_map(said).collect();
    Arc::new(Published { inventory: Inventory { pools: [(pool.clone(), listed)].into() }, health })
}
