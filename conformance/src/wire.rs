//! Calls of a driver, and a log of what was exchanged.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use nodedock_proto::kubelet::dra::{v1, v1beta1};
use nodedock_proto::kubelet::dra_health;
use nodedock_stand_ins::kubelet::{ClaimRef, authority};
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// Number of first lines of a log that are kept, and number of first bytes of each line.
const LINES_MAX: usize = 400;
const LINE_BYTES: usize = 2 << 10;
/// Time between two attempts of a call that is repeated.
const RETRY: Duration = Duration::from_millis(200);

pub(crate) use v1::Device;

/// The messages exchanged with a driver, in order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    pub(crate) fn add(&self, line: impl Into<String>) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut line: String = line.into();
        if line.len() > LINE_BYTES {
            line.truncate(line.floor_char_boundary(LINE_BYTES));
            line.push('…');
        }
        match lines.len() {
            0..LINES_MAX => lines.push(line),
            LINES_MAX => lines.push("… and more".to_owned()),
            _ => {}
        }
    }

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V1beta1,
}

impl Version {
    const ALL: [Self; 2] = [Self::V1, Self::V1beta1];

    /// Its service, as a driver lists it.
    pub(crate) fn service(self) -> &'static str {
        match self {
            Self::V1 => "v1.DRAPlugin",
            Self::V1beta1 => "v1beta1.DRAPlugin",
        }
    }

    /// Those whose services a driver lists.
    pub(crate) fn listed(services: &[String]) -> impl Iterator<Item = Self> {
        Self::ALL
            .into_iter()
            .filter(|version| services.iter().any(|listed| listed == version.service()))
    }
}

/// The entries of an answer in the order of the wire: the claim's UID, and its devices or its error.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ClaimEntries(pub(crate) Vec<(String, Result<Vec<Device>, String>)>);

impl ClaimEntries {
    /// Returns the devices of a claim.
    ///
    /// # Errors
    ///
    /// The answer has no entry for the claim, several, or one with an error.
    pub(crate) fn of(&self, claim: &ClaimRef) -> Result<Vec<Device>> {
        let mut entries = self.0.iter().filter(|(uid, _)| *uid == claim.uid);
        let (name, uid) = (&claim.name, &claim.uid);
        match (entries.next(), entries.next()) {
            (None, _) => bail!("the answer has no entry for claim {name} ({uid})"),
            (Some(_), Some(_)) => bail!("the answer has two entries for claim {name} ({uid})"),
            (Some((_, Err(error))), None) => bail!("claim {name} ({uid}) is refused: {error}"),
            (Some((_, Ok(devices))), None) => Ok(sorted(devices.clone())),
        }
    }
}

/// Sorts devices, so that their order does not depend on the driver.
fn sorted(mut devices: Vec<Device>) -> Vec<Device> {
    for device in &mut devices {
        device.cdi_device_ids.sort();
        device.request_names.sort();
    }
    devices.sort_by_key(|device| {
        (
            device.pool_name.clone(),
            device.device_name.clone(),
            device.share_id.clone(),
        )
    });
    devices
}

/// A claim as a later version of the API might have it.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LaterClaim {
    #[prost(string, tag = "1")]
    pub(crate) namespace: String,
    #[prost(string, tag = "2")]
    pub(crate) uid: String,
    #[prost(string, tag = "3")]
    pub(crate) name: String,
    #[prost(string, tag = "99")]
    pub(crate) later: String,
}

/// `NodePrepareResourcesRequest` as a later version of the API might have it.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LaterPrepare {
    #[prost(message, repeated, tag = "1")]
    pub(crate) claims: Vec<LaterClaim>,
    #[prost(string, tag = "99")]
    pub(crate) later: String,
}

/// The claims of a request in one version of the API.
macro_rules! named {
    ($version:ident, $claims:expr) => {{
        let claim = |claim: &ClaimRef| {
            let ClaimRef {
                namespace,
                name,
                uid,
            } = claim.clone();
            $version::Claim {
                namespace,
                uid,
                name,
            }
        };
        $claims.iter().map(claim).collect()
    }};
}

/// The answer to an unprepare.
macro_rules! unprepared {
    ($answer:expr) => {{
        let entries = $answer.into_inner().claims.into_iter();
        let one = entries.map(|one| {
            (
                one.key,
                outcome(Vec::new(), one.value.unwrap_or_default().error),
            )
        });
        ClaimEntries(one.collect())
    }};
}

fn outcome(devices: Vec<Device>, error: String) -> Result<Vec<Device>, String> {
    if error.is_empty() {
        Ok(devices)
    } else {
        Err(error)
    }
}

fn newer(device: v1beta1::Device) -> Device {
    let v1beta1::Device {
        request_names,
        pool_name,
        device_name,
        cdi_device_ids,
    } = device;
    Device {
        request_names,
        pool_name,
        device_name,
        cdi_device_ids,
        share_id: None,
    }
}

/// A connection to a driver's service.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    channel: Channel,
    log: Log,
    timeout: Duration,
}

impl Client {
    pub(crate) async fn dial(
        endpoint: &Path,
        wait: Duration,
        timeout: Duration,
        log: &Log,
    ) -> Result<Self> {
        let stream = authority::dial(endpoint, wait)
            .await
            .map_err(|why| anyhow!("{why}"))?;
        let (channel, _) = authority::channel(stream, None)
            .await
            .map_err(|why| anyhow!("{why}"))?;
        Ok(Self {
            channel,
            log: log.clone(),
            timeout,
        })
    }

    /// Returns a client whose calls are not logged.
    pub(crate) fn quiet(&self) -> Self {
        Self {
            log: Log::default(),
            ..self.clone()
        }
    }

    /// Returns a client with another deadline for its calls.
    pub(crate) fn within(&self, timeout: Duration) -> Self {
        Self {
            timeout,
            ..self.clone()
        }
    }

    pub(crate) fn health_v1(
        &self,
    ) -> dra_health::v1::dra_resource_health_client::DraResourceHealthClient<Channel> {
        dra_health::v1::dra_resource_health_client::DraResourceHealthClient::new(
            self.channel.clone(),
        )
    }

    pub(crate) fn health_v1alpha1(
        &self,
    ) -> dra_health::v1alpha1::dra_resource_health_client::DraResourceHealthClient<Channel> {
        dra_health::v1alpha1::dra_resource_health_client::DraResourceHealthClient::new(
            self.channel.clone(),
        )
    }

    /// One call of `NodePrepareResources`.
    pub(crate) async fn prepare_by(
        &self,
        version: Version,
        claims: &[ClaimRef],
    ) -> Result<ClaimEntries, Status> {
        let call = async {
            match version {
                Version::V1 => {
                    let request = v1::NodePrepareResourcesRequest {
                        claims: named!(v1, claims),
                    };
                    let mut client =
                        v1::dra_plugin_client::DraPluginClient::new(self.channel.clone());
                    let answer = client.node_prepare_resources(self.request(request)).await?;
                    Ok(prepared(answer.into_inner()))
                }
                Version::V1beta1 => {
                    let request = v1beta1::NodePrepareResourcesRequest {
                        claims: named!(v1beta1, claims),
                    };
                    let mut client =
                        v1beta1::dra_plugin_client::DraPluginClient::new(self.channel.clone());
                    let answer = client.node_prepare_resources(self.request(request)).await?;
                    Ok(prepared_v1beta1(answer.into_inner()))
                }
            }
        };
        self.logged(&format!("NodePrepareResources {version:?}"), claims, call)
            .await
    }

    /// One call of `NodeUnprepareResources`.
    pub(crate) async fn unprepare_by(
        &self,
        version: Version,
        claims: &[ClaimRef],
    ) -> Result<ClaimEntries, Status> {
        let call = async {
            match version {
                Version::V1 => {
                    let request = v1::NodeUnprepareResourcesRequest {
                        claims: named!(v1, claims),
                    };
                    let mut client =
                        v1::dra_plugin_client::DraPluginClient::new(self.channel.clone());
                    let answer = client
                        .node_unprepare_resources(self.request(request))
                        .await?;
                    Ok(unprepared!(answer))
                }
                Version::V1beta1 => {
                    let request = v1beta1::NodeUnprepareResourcesRequest {
                        claims: named!(v1beta1, claims),
                    };
                    let mut client =
                        v1beta1::dra_plugin_client::DraPluginClient::new(self.channel.clone());
                    let answer = client
                        .node_unprepare_resources(self.request(request))
                        .await?;
                    Ok(unprepared!(answer))
                }
            }
        };
        self.logged(&format!("NodeUnprepareResources {version:?}"), claims, call)
            .await
    }

    /// A prepare whose messages have a field that this version of the API does not know.
    pub(crate) async fn prepare_later(
        &self,
        version: Version,
        claim: &ClaimRef,
    ) -> Result<ClaimEntries, Status> {
        let later = "later".to_owned();
        let ClaimRef {
            namespace,
            name,
            uid,
        } = claim.clone();
        let claims = vec![LaterClaim {
            namespace,
            uid,
            name,
            later: later.clone(),
        }];
        let request = LaterPrepare { claims, later };
        let call = async {
            match version {
                Version::V1 => self.unary("v1", request).await.map(prepared),
                Version::V1beta1 => self.unary("v1beta1", request).await.map(prepared_v1beta1),
            }
        };
        let what = format!("NodePrepareResources {version:?} with field 99");
        self.logged(&what, std::slice::from_ref(claim), call).await
    }

    /// One call of `NodePrepareResources` of a version, by the name that its package ends with.
    async fn unary<T: prost::Message + Default + 'static>(
        &self,
        version: &str,
        request: LaterPrepare,
    ) -> Result<T, Status> {
        let mut client = tonic::client::Grpc::new(self.channel.clone());
        client
            .ready()
            .await
            .map_err(|error| Status::unavailable(error.to_string()))?;
        let path = format!("/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodePrepareResources");
        let path = path
            .parse()
            .map_err(|_| Status::internal("the path of a call"))?;
        let codec = tonic_prost::ProstCodec::<LaterPrepare, T>::default();
        Ok(client
            .unary(self.request(request), path, codec)
            .await?
            .into_inner())
    }

    /// Unprepares one claim by a version.
    pub(crate) async fn unprepare_one_by(&self, version: Version, claim: &ClaimRef) -> Result<()> {
        let answer = self
            .unprepare_by(version, std::slice::from_ref(claim))
            .await;
        let answer =
            answer.map_err(|status| failed(&format!("unprepare by {version:?}"), &status))?;
        answer
            .of(claim)
            .map(drop)
            .with_context(|| format!("unprepare by {version:?}"))
    }

    /// Prepares one claim.
    pub(crate) async fn prepare(&self, claim: &ClaimRef) -> Result<Vec<Device>> {
        let claims = std::slice::from_ref(claim);
        let answer = self
            .prepare_by(Version::V1, claims)
            .await
            .map_err(|status| failed("prepare", &status))?;
        answer.of(claim)
    }

    /// Unprepares one claim.
    pub(crate) async fn unprepare(&self, claim: &ClaimRef) -> Result<()> {
        let claims = std::slice::from_ref(claim);
        let answer = self
            .unprepare_by(Version::V1, claims)
            .await
            .map_err(|status| failed("unprepare", &status))?;
        answer.of(claim).map(drop)
    }

    /// Prepares one claim, and tries again as a kubelet does: a driver that has just started may not be ready.
    pub(crate) async fn prepare_as_kubelet(&self, claim: &ClaimRef) -> Result<Vec<Device>> {
        self.until_done(|| self.prepare(claim)).await
    }

    /// Unprepares one claim, and tries again as a kubelet does.
    pub(crate) async fn unprepare_as_kubelet(&self, claim: &ClaimRef) -> Result<()> {
        self.until_done(|| self.unprepare(claim)).await
    }

    /// Repeats a call until it succeeds, within the deadline of a call.
    async fn until_done<T, F: Future<Output = Result<T>>>(
        &self,
        call: impl Fn() -> F,
    ) -> Result<T> {
        let end = Instant::now() + self.timeout;
        loop {
            match call().await {
                Err(error) if Instant::now() >= end => {
                    return Err(error.context(format!("also after {:?}", self.timeout)));
                }
                Err(_) => tokio::time::sleep(RETRY).await,
                done => return done,
            }
        }
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.timeout);
        request
    }

    async fn logged(
        &self,
        what: &str,
        claims: &[ClaimRef],
        call: impl Future<Output = Result<ClaimEntries, Status>>,
    ) -> Result<ClaimEntries, Status> {
        let named: Vec<_> = claims
            .iter()
            .map(|claim| format!("{}/{} {}", claim.namespace, claim.name, claim.uid))
            .collect();
        self.log.add(format!("→ {what} [{}]", named.join(", ")));
        // A driver need not keep the deadline, nor its connection.
        let answer = tokio::time::timeout(self.timeout + Duration::from_secs(1), call).await;
        let answer =
            answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("the driver did not answer")));
        match &answer {
            Ok(answer) => self.log.add(format!("← {:?}", answer.0)),
            Err(status) => self
                .log
                .add(format!("← {:?}: {}", status.code(), status.message())),
        }
        answer
    }
}

fn prepared(answer: v1::NodePrepareResourcesResponse) -> ClaimEntries {
    let entries = answer.claims.into_iter().map(|entry| {
        let one = entry.value.unwrap_or_default();
        (entry.key, outcome(one.devices, one.error))
    });
    ClaimEntries(entries.collect())
}

fn prepared_v1beta1(answer: v1beta1::NodePrepareResourcesResponse) -> ClaimEntries {
    let entries = answer.claims.into_iter().map(|entry| {
        let one = entry.value.unwrap_or_default();
        (
            entry.key,
            outcome(one.devices.into_iter().map(newer).collect(), one.error),
        )
    });
    ClaimEntries(entries.collect())
}

/// A call that has no answer.
pub(crate) fn failed(call: &str, status: &Status) -> anyhow::Error {
    match status.code() {
        Code::DeadlineExceeded | Code::Cancelled => {
            anyhow!("{call} is not answered within its deadline")
        }
        code => anyhow!("{call} fails as a whole, {code:?}: {}", status.message()),
    }
}
