//! DRA drivers: their instances and connections, and the calls for claims.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nodedock_proto::kubelet::dra::v1;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Response, Status};

use super::instance::{Instance, Link};
use super::state::{Shared, State};
use super::{authority, health};

/// Pause between attempts to reconnect.
const RECONNECT: Duration = Duration::from_millis(100);
/// The service by which drivers are called, as plugins advertise it.
const SERVICE: &str = "v1.DRAPlugin";

/// The fields of a claim that a kubelet sends.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl ClaimRef {
    pub fn new(namespace: &str, name: &str, uid: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
        }
    }
}

/// Checks that a plugin has the service that the kubelet calls.
pub(super) fn validate(driver: &str, endpoint: &Path, versions: &[String]) -> Result<(), String> {
    if versions.iter().any(|version| version == SERVICE) {
        return Ok(());
    }
    Err(format!(
        "invalid supported gRPC versions of DRA driver plugin {driver} at endpoint {}: none of services supported by the plugin \
         ({versions:?}) are supported by the kubelet ({SERVICE})",
        endpoint.display()
    ))
}

/// Takes an instance, and begins to connect to it. Gives its number.
pub(super) fn register(
    shared: &Arc<Shared>,
    driver: &str,
    endpoint: PathBuf,
) -> Result<u64, String> {
    let instance = shared.change(|state| {
        let number = state.number();
        let instances = state.instances.entry(driver.to_owned()).or_default();
        if instances
            .iter()
            .any(|instance| instance.endpoint == endpoint)
        {
            return Err(format!(
                "endpoint {} already registered for DRA driver plugin {driver}",
                endpoint.display()
            ));
        }
        let instance = Arc::new(Instance::new(number, endpoint));
        instances.push(Arc::clone(&instance));
        Ok(instance)
    })?;
    let number = instance.number;
    let (at, link) = (instance.endpoint.clone(), instance.link.clone());
    let connecting = stay_connected(Arc::clone(shared), driver.to_owned(), at, link.clone());
    tokio::spawn(ended_with(instance.end.clone(), connecting));
    let watching = health::follow(Arc::clone(shared), driver.to_owned(), link);
    tokio::spawn(ended_with(instance.end.clone(), watching));
    Ok(number)
}

async fn ended_with(end: CancellationToken, work: impl Future<Output = ()>) {
    tokio::select! {
        () = end.cancelled() => {}
        () = work => {}
    }
}

pub(super) fn notified(shared: &Shared, driver: &str, number: u64) {
    shared.change(|state| {
        for instance in state.instances.get(driver).into_iter().flatten() {
            if instance.number == number {
                instance.set_notified();
            }
        }
    });
}

pub(super) fn deregister(shared: &Arc<Shared>, driver: &str, number: u64) {
    shared.change(|state| {
        if let Some(instances) = state.instances.get_mut(driver) {
            let gone = instances
                .iter()
                .position(|instance| instance.number == number);
            if let Some(gone) = gone {
                instances.remove(gone).end.cancel();
                state.health.remove(driver);
            }
        }
    });
    shared.note_quietly("deregister", driver);
    wipe_later(shared, driver);
}

fn is_connected(state: &State, driver: &str) -> bool {
    state
        .instances
        .get(driver)
        .into_iter()
        .flatten()
        .any(|instance| instance.is_connected())
}

/// Slices go when no instance of their driver has been connected for a while. One wait at a time: the first one's end counts.
fn wipe_later(shared: &Arc<Shared>, driver: &str) {
    let begun = shared.change(|state| {
        let process = state.process;
        let wanted = shared.options.wipes.is_some() && !is_connected(state, driver);
        let begun = wanted && state.wiping.insert(driver.to_owned(), process) != Some(process);
        begun.then_some(process)
    });
    let Some(process) = begun else { return };
    let (weak, mut ticks) = (Arc::downgrade(shared), shared.ticks());
    let (driver, wait) = (driver.to_owned(), shared.options.wipe_after);
    tokio::spawn(async move {
        let mut late = std::pin::pin!(tokio::time::sleep(wait));
        let over = loop {
            let over = tokio::select! {
                () = &mut late => true,
                _ = ticks.changed() => false,
            };
            let Some(shared) = weak.upgrade() else { return };
            let needless =
                shared.look(|state| state.process != process || is_connected(state, &driver));
            if over || needless {
                break !needless;
            }
        };
        let Some(shared) = weak.upgrade() else { return };
        shared.change(|state| {
            state
                .wiping
                .retain(|wiped, began| *wiped != driver || *began != process)
        });
        if over {
            if let Some(wipes) = &shared.options.wipes {
                wipes(Some(&driver));
            }
            shared.note_quietly("wipe", &driver);
        }
    });
}

/// Connects to an instance, and again whenever the connection is lost.
async fn stay_connected(
    shared: Arc<Shared>,
    driver: String,
    endpoint: PathBuf,
    link: watch::Sender<Link>,
) {
    wipe_later(&shared, &driver);
    loop {
        match connect(&endpoint).await {
            Ok((channel, lost)) => {
                link.send_replace(Link::Ready(channel));
                shared.wake();
                lost.cancelled().await;
                link.send_replace(Link::Connecting);
                shared.note_quietly("connection lost", &driver);
                wipe_later(&shared, &driver);
            }
            Err(error) => {
                link.send_replace(Link::Failed(error));
                shared.wake();
                tokio::time::sleep(RECONNECT).await;
            }
        }
    }
}

async fn connect(endpoint: &Path) -> Result<(Channel, CancellationToken), String> {
    let stream = UnixStream::connect(endpoint).await;
    let stream =
        stream.map_err(|error| format!("connection error: {}: {error}", endpoint.display()))?;
    authority::channel(stream, None).await
}

/// The instance that gets calls: the newest that is connected, or else the newest.
fn chosen(state: &State, driver: &str) -> Result<Arc<Instance>, String> {
    let instances = state
        .instances
        .get(driver)
        .map(Vec::as_slice)
        .unwrap_or_default();
    let connected = instances
        .iter()
        .rev()
        .find(|instance| instance.is_connected());
    let found = connected.or(instances.last()).cloned();
    found.ok_or_else(|| format!("DRA driver {driver} is not registered"))
}

/// A DRA driver as a kubelet calls it: the instance that it would choose, with its checks of the answer.
#[derive(Clone, Debug)]
pub struct Driver {
    pub(super) shared: Arc<Shared>,
    pub(super) name: String,
}

impl Driver {
    /// One call of `NodePrepareResources`; the devices by claim UID.
    pub async fn prepare(
        &self,
        claims: &[ClaimRef],
    ) -> Result<BTreeMap<String, Vec<v1::Device>>, String> {
        const CALL: &str = "NodePrepareResources";
        let instance = self.shared.look(|state| chosen(state, &self.name))?;
        let request = v1::NodePrepareResourcesRequest {
            claims: named(claims),
        };
        let work = instance.sent(|mut client| {
            let request = request.clone();
            async move { client.node_prepare_resources(request).await }
        });
        let answer = self.call(CALL, work).await?.into_claims();
        check(CALL, claims, &answer, |one| &one.error)?;
        Ok(answer
            .into_iter()
            .map(|(uid, one)| (uid, one.devices))
            .collect())
    }

    /// One call of `NodeUnprepareResources`.
    pub async fn unprepare(&self, claims: &[ClaimRef]) -> Result<(), String> {
        const CALL: &str = "NodeUnprepareResources";
        let instance = self.shared.look(|state| chosen(state, &self.name))?;
        let request = v1::NodeUnprepareResourcesRequest {
            claims: named(claims),
        };
        let work = instance.sent(|mut client| {
            let request = request.clone();
            async move { client.node_unprepare_resources(request).await }
        });
        check(
            CALL,
            claims,
            &self.call(CALL, work).await?.into_claims(),
            |one| &one.error,
        )
    }

    async fn call<T>(
        &self,
        what: &str,
        work: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, String> {
        let answer = self
            .shared
            .call(what, &self.name, self.shared.options.call_timeout, work)
            .await;
        answer
            .map(Response::into_inner)
            .map_err(|error| format!("{what}: {error}"))
    }
}

fn named(claims: &[ClaimRef]) -> Vec<v1::Claim> {
    let name = |claim: &ClaimRef| {
        let ClaimRef {
            namespace,
            name,
            uid,
        } = claim.clone();
        v1::Claim {
            namespace,
            uid,
            name,
        }
    };
    claims.iter().map(name).collect()
}

/// Checks an answer by claim UID as a kubelet does.
fn check<T>(
    call: &str,
    claims: &[ClaimRef],
    answer: &BTreeMap<String, T>,
    error: impl Fn(&T) -> &String,
) -> Result<(), String> {
    for (uid, one) in answer {
        let Some(claim) = claims.iter().find(|claim| claim.uid == *uid) else {
            return Err(format!(
                "{call} returned result for unknown claim UID {uid}"
            ));
        };
        if !error(one).is_empty() {
            return Err(format!(
                "{call} failed for ResourceClaim {}: {}",
                claim.name,
                error(one)
            ));
        }
    }
    match claims.len() - answer.len() {
        0 => Ok(()),
        skipped => Err(format!("{call} skipped {skipped} ResourceClaims")),
    }
}
