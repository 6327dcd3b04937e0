//! DRA drivers: their instances and connections, and the calls for claims.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use nodedock_proto::kubelet::dra::{v1, v1beta1};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Channel;

use super::state::{Inner, State};
use super::{Release, authority, health};

/// Between tries to connect again.
const RECONNECT: Duration = Duration::from_millis(100);
/// What a socket's address can hold, without the zero at its end.
const PATH_MOST: usize = 107;

/// What a kubelet says of a claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl ClaimRef {
    pub fn new(namespace: &str, name: &str, uid: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned(), uid: uid.to_owned() }
    }
}

/// A device as a driver answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreparedDevice {
    pub requests: Vec<String>,
    pub pool: String,
    pub device: String,
    pub cdi: Vec<String>,
    pub share: Option<String>,
}

/// How a connection is.
#[derive(Clone, Debug)]
pub(super) enum Link {
    Connecting,
    Ready(Channel),
    Failed(String),
}

/// One registered socket of a driver.
#[derive(Debug)]
pub(super) struct Instance {
    pub(super) number: u64,
    pub(super) endpoint: PathBuf,
    /// `v1` rather than `v1beta1`.
    newer: bool,
    pub(super) link: watch::Sender<Link>,
    /// Whether it has been notified of its registration.
    notified: AtomicBool,
    end: CancellationToken,
}

impl Instance {
    pub(super) fn is_connected(&self) -> bool {
        matches!(*self.link.borrow(), Link::Ready(_))
    }

    pub(super) fn is_notified(&self) -> bool {
        self.notified.load(Ordering::SeqCst)
    }
}

/// The service to call a plugin by: the first of its list that the kubelet knows.
pub(super) fn validate(
    inner: &Inner,
    driver: &str,
    endpoint: &Path,
    versions: &[String],
) -> Result<String, String> {
    let at = endpoint.display();
    if versions.is_empty() {
        return Err(format!(
            "invalid supported gRPC versions of DRA driver plugin {driver} at endpoint {at}: empty list of supported gRPC services"
        ));
    }
    if inner.options.release == Release::V1_37 {
        let long = endpoint.as_os_str().len() > PATH_MOST;
        if !endpoint.is_absolute() || long || !endpoint.starts_with(&inner.root) {
            return Err(format!("invalid endpoint {at} of DRA driver plugin {driver}"));
        }
        if driver.is_empty() || driver.len() > 63 {
            return Err(format!("invalid name {driver:?} of DRA driver plugin"));
        }
    }
    let known = &inner.options.services;
    versions.iter().find(|version| known.contains(version)).cloned().ok_or_else(|| {
        format!(
            "invalid supported gRPC versions of DRA driver plugin {driver} at endpoint {at}: none of services supported by the plugin \
             ({versions:?}) are supported by the kubelet ({known:?})"
        )
    })
}

/// Takes an instance, and begins to connect to it. Gives its number.
pub(super) fn register(
    inner: &Arc<Inner>,
    driver: &str,
    endpoint: PathBuf,
    service: &str,
    versions: &[String],
) -> Result<u64, String> {
    let instance = inner.change(|state| {
        let number = state.number();
        let instances = state.instances.entry(driver.to_owned()).or_default();
        if instances.iter().any(|instance| instance.endpoint == endpoint) {
            return Err(format!(
                "endpoint {} already registered for DRA driver plugin {driver}",
                endpoint.display()
            ));
        }
        let instance = Arc::new(Instance {
            number,
            endpoint,
            newer: service.starts_with("v1."),
            link: watch::Sender::new(Link::Connecting),
            notified: AtomicBool::new(false),
            end: CancellationToken::new(),
        });
        instances.push(Arc::clone(&instance));
        Ok(instance)
    })?;
    let number = instance.number;
    let (at, link) = (instance.endpoint.clone(), instance.link.clone());
    let connecting = stay_connected(Arc::clone(inner), driver.to_owned(), at, link.clone());
    tokio::spawn(ended_with(instance.end.clone(), connecting));
    if let Some(newer) = health::version(inner.options.release, versions) {
        let watching = health::follow(Arc::clone(inner), driver.to_owned(), link, newer);
        tokio::spawn(ended_with(instance.end.clone(), watching));
    }
    Ok(number)
}

async fn ended_with(end: CancellationToken, work: impl Future<Output = ()>) {
    tokio::select! {
        () = end.cancelled() => {}
        () = work => {}
    }
}

pub(super) fn notified(inner: &Inner, driver: &str, number: u64) {
    inner.change(|state| {
        for instance in state.instances.get(driver).into_iter().flatten() {
            if instance.number == number {
                instance.notified.store(true, Ordering::SeqCst);
            }
        }
    });
}

pub(super) fn deregister(inner: &Arc<Inner>, driver: &str, number: u64) {
    inner.change(|state| {
        if let Some(instances) = state.instances.get_mut(driver) {
            let gone = instances.iter().position(|instance| instance.number == number);
            if let Some(gone) = gone {
                instances.remove(gone).end.cancel();
                state.health.remove(driver);
            }
        }
    });
    inner.note_quietly("deregister", driver);
    wipe_later(inner, driver);
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

fn is_connected(state: &State, driver: &str) -> bool {
    state.instances.get(driver).into_iter().flatten().any(|instance| instance.is_connected())
}

/// Slices go when no instance of their driver has been connected for a while. One wait at a time: the first one's end counts.
fn wipe_later(inner: &Arc<Inner>, driver: &str) {
    let begun = inner.change(|state| {
        let process = state.process;
        let wanted = inner.options.wipes.is_some() && !is_connected(state, driver);
        let begun = wanted && state.wiping.insert(driver.to_owned(), process) != Some(process);
        begun.then_some(process)
    });
    let Some(process) = begun else { return };
    let (weak, mut ticks) = (Arc::downgrade(inner), inner.ticks());
    let (driver, wait) = (driver.to_owned(), inner.options.wipe_after);
    tokio::spawn(async move {
        let mut late = std::pin::pin!(tokio::time::sleep(wait));
        let over = loop {
            let over = tokio::select! {
                () = &mut late => true,
                _ = ticks.changed() => false,
            };
            let Some(inner) = weak.upgrade() else { return };
            let needless = inner.look(|state| state.process != process || is_connected(state, &driver));
            if over || needless {
                break !needless;
            }
        };
        let Some(inner) = weak.upgrade() else { return };
        inner.change(|state| state.wiping.retain(|wiped, began| *wiped != driver || *began != process));
        if over {
            if let Some(wipes) = &inner.options.wipes {
                wipes(Some(&driver));
            }
            inner.note_quietly("wipe", &driver);
        }
    });
}

/// Connects to an instance, and again whenever the connection is lost.
async fn stay_connected(inner: Arc<Inner>, driver: String, endpoint: PathBuf, link: watch::Sender<Link>) {
    wipe_later(&inner, &driver);
    loop {
        match connect(&endpoint).await {
            Ok((channel, lost)) => {
                link.send_replace(Link::Ready(channel));
                inner.wake();
                lost.cancelled().await;
                link.send_replace(Link::Connecting);
                inner.note_quietly("connection lost", &driver);
                wipe_later(&inner, &driver);
            }
            Err(error) => {
                link.send_replace(Link::Failed(error));
                inner.wake();
                tokio::time::sleep(RECONNECT).await;
            }
        }
    }
}

/// A connection, and what is cancelled when it is lost.
async fn connect(endpoint: &Path) -> Result<(Channel, CancellationToken), String> {
    let stream = UnixStream::connect(endpoint).await;
    let stream = stream.map_err(|error| format!("connection error: {}: {error}", endpoint.display()))?;
    let lost = CancellationToken::new();
    let tracked = Tracked { stream, _lost: lost.clone().drop_guard() };
    Ok((authority::channel(tracked).await?, lost))
}

/// A connection that tells when it is closed.
struct Tracked {
    stream: UnixStream,
    _lost: tokio_util::sync::DropGuard,
}

impl AsyncRead for Tracked {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Tracked {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The instance that gets calls: the newest that is connected, or else the newest.
fn chosen(state: &State, driver: &str) -> Result<Arc<Instance>, String> {
    let instances = state.instances.get(driver).map(Vec::as_slice).unwrap_or_default();
    let connected = instances.iter().rev().find(|instance| instance.is_connected());
    let found = connected.or(instances.last()).cloned();
    found.ok_or_else(|| format!("DRA driver {driver} is not registered"))
}

/// Waits while a connection is being made; one that failed fails at once.
pub(super) async fn channel(link: &watch::Sender<Link>) -> Result<Channel, Status> {
    let mut link = link.subscribe();
    loop {
        match &*link.borrow_and_update() {
            Link::Ready(channel) => return Ok(channel.clone()),
            Link::Failed(why) => return Err(Status::unavailable(why.clone())),
            Link::Connecting => {}
        }
        let gone = Status::unavailable("the plugin is gone");
        link.changed().await.map_err(|_| gone)?;
    }
}

pub(super) async fn prepare(
    inner: &Inner,
    driver: &str,
    claims: &[ClaimRef],
) -> Result<BTreeMap<String, Vec<PreparedDevice>>, String> {
    let instance = inner.look(|state| chosen(state, driver))?;
    let work = async {
        let channel = channel(&instance.link).await?;
        if instance.newer {
            prepare_v1(channel, claims).await
        } else {
            prepare_v1beta1(channel, claims).await
        }
    };
    let answer = inner.call("NodePrepareResources", driver, inner.options.call_timeout, work).await;
    let answer = answer.map_err(|error| format!("NodePrepareResources: {error}"))?;
    check("NodePrepareResources", claims, &answer, |(_, error)| error)?;
    Ok(answer.into_iter().map(|(uid, (devices, _))| (uid, devices)).collect())
}

type Answers = BTreeMap<String, (Vec<PreparedDevice>, String)>;

async fn prepare_v1(channel: Channel, claims: &[ClaimRef]) -> Result<Answers, Status> {
    let claim = |claim: &ClaimRef| {
        let ClaimRef { namespace, name, uid } = claim.clone();
        v1::Claim { namespace, uid, name }
    };
    let request = v1::NodePrepareResourcesRequest { claims: claims.iter().map(claim).collect() };
    let answer = v1::dra_plugin_client::DraPluginClient::new(channel).node_prepare_resources(request).await?;
    let device = |device: v1::Device| PreparedDevice {
        requests: device.request_names,
        pool: device.pool_name,
        device: device.device_name,
        cdi: device.cdi_device_ids,
        share: device.share_id,
    };
    let claims = answer.into_inner().into_claims().into_iter();
    Ok(claims.map(|(uid, one)| (uid, (one.devices.into_iter().map(device).collect(), one.error))).collect())
}

async fn prepare_v1beta1(channel: Channel, claims: &[ClaimRef]) -> Result<Answers, Status> {
    let claim = |claim: &ClaimRef| {
        let ClaimRef { namespace, name, uid } = claim.clone();
        v1beta1::Claim { namespace, uid, name }
    };
    let request = v1beta1::NodePrepareResourcesRequest { claims: claims.iter().map(claim).collect() };
    let mut client = v1beta1::dra_plugin_client::DraPluginClient::new(channel);
    let answer = client.node_prepare_resources(request).await?;
    let device = |device: v1beta1::Device| PreparedDevice {
        requests: device.request_names,
        pool: device.pool_name,
        device: device.device_name,
        cdi: device.cdi_device_ids,
        share: None,
    };
    let claims = answer.into_inner().into_claims().into_iter();
    Ok(claims.map(|(uid, one)| (uid, (one.devices.into_iter().map(device).collect(), one.error))).collect())
}

pub(super) async fn unprepare(inner: &Inner, driver: &str, claims: &[ClaimRef]) -> Result<(), String> {
    let instance = inner.look(|state| chosen(state, driver))?;
    let work = async {
        let channel = channel(&instance.link).await?;
        if instance.newer {
            unprepare_v1(channel, claims).await
        } else {
            unprepare_v1beta1(channel, claims).await
        }
    };
    let answer = inner.call("NodeUnprepareResources", driver, inner.options.call_timeout, work).await;
    let answer = answer.map_err(|error| format!("NodeUnprepareResources: {error}"))?;
    check("NodeUnprepareResources", claims, &answer, |error| error)
}

async fn unprepare_v1(channel: Channel, claims: &[ClaimRef]) -> Result<BTreeMap<String, String>, Status> {
    let claim = |claim: &ClaimRef| {
        let ClaimRef { namespace, name, uid } = claim.clone();
        v1::Claim { namespace, uid, name }
    };
    let request = v1::NodeUnprepareResourcesRequest { claims: claims.iter().map(claim).collect() };
    let answer =
        v1::dra_plugin_client::DraPluginClient::new(channel).node_unprepare_resources(request).await?;
    Ok(answer.into_inner().into_claims().into_iter().map(|(uid, one)| (uid, one.error)).collect())
}

async fn unprepare_v1beta1(
    channel: Channel,
    claims: &[ClaimRef],
) -> Result<BTreeMap<String, String>, Status> {
    let claim = |claim: &ClaimRef| {
        let ClaimRef { namespace, name, uid } = claim.clone();
        v1beta1::Claim { namespace, uid, name }
    };
    let request = v1beta1::NodeUnprepareResourcesRequest { claims: claims.iter().map(claim).collect() };
    let mut client = v1beta1::dra_plugin_client::DraPluginClient::new(channel);
    let answer = client.node_unprepare_resources(request).await?;
    Ok(answer.into_inner().into_claims().into_iter().map(|(uid, one)| (uid, one.error)).collect())
}

/// What a kubelet makes of an answer by claim UID.
fn check<T>(
    call: &str,
    claims: &[ClaimRef],
    answer: &BTreeMap<String, T>,
    error: impl Fn(&T) -> &String,
) -> Result<(), String> {
    for (uid, one) in answer {
        let Some(claim) = claims.iter().find(|claim| claim.uid == *uid) else {
            return Err(format!("{call} returned result for unknown claim UID {uid}"));
        };
        if !error(one).is_empty() {
            return Err(format!("{call} failed for ResourceClaim {}: {}", claim.name, error(one)));
        }
    }
    match claims.len() - answer.len() {
        0 => Ok(()),
        skipped => Err(format!("{call} skipped {skipped} ResourceClaims")),
    }
}
