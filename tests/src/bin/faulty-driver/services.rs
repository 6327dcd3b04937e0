//! The gRPC services.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt, stream};
use nodedock_proto::kubelet::{dra, dra_health, registration as reg};
use tonic::{Request, Response, Status};

use crate::Driver;
use crate::claims::Claim;
use crate::fault::Fault;
use crate::slices;
use crate::state::Prepared;

pub(crate) struct Registration {
    pub(crate) driver: Arc<Driver>,
    pub(crate) endpoint: PathBuf,
}

#[tonic::async_trait]
impl reg::registration_server::Registration for Registration {
    async fn get_info(
        &self,
        _: Request<reg::InfoRequest>,
    ) -> Result<Response<reg::PluginInfo>, Status> {
        let kind = if self.driver.has(Fault::OtherType) {
            "CSIPlugin"
        } else {
            "DRAPlugin"
        };
        let endpoint = if self.driver.has(Fault::EndpointIsRelative) {
            "dra.sock".into()
        } else {
            self.endpoint.clone()
        };
        let services = ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth"];
        Ok(Response::new(reg::PluginInfo {
            r#type: kind.to_owned(),
            name: self.driver.name.clone(),
            endpoint: endpoint.display().to_string(),
            supported_versions: services.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        _: Request<reg::RegistrationStatus>,
    ) -> Result<Response<reg::RegistrationStatusResponse>, Status> {
        match self.driver.has(Fault::RefusesTheNotification) {
            true => Err(Status::unimplemented("not here")),
            false => Ok(Response::new(reg::RegistrationStatusResponse {})),
        }
    }
}

/// Set by a call that was dropped soon after it began.
static IS_STUCK: AtomicBool = AtomicBool::new(false);

struct Under<'a> {
    driver: &'a Driver,
    began: Instant,
    is_done: bool,
}

impl Drop for Under<'_> {
    fn drop(&mut self) {
        self.driver.claims.under_way.fetch_sub(1, Ordering::SeqCst);
        let is_cancelled = !self.is_done && self.began.elapsed() < Duration::from_secs(1);
        if is_cancelled && self.driver.has(Fault::StuckAfterACancelledCall) {
            IS_STUCK.store(true, Ordering::SeqCst);
        }
    }
}

#[derive(Clone)]
pub(crate) struct Dra(pub(crate) Arc<Driver>);

type Entries = Vec<(String, Result<Vec<Prepared>, String>)>;

impl Dra {
    async fn answer(&self, is_prepare: bool, claims: Vec<Claim>) -> Result<Entries, Status> {
        let driver = &self.0;
        let others = driver.claims.under_way.fetch_add(1, Ordering::SeqCst);
        let mut under = Under {
            driver,
            began: Instant::now(),
            is_done: false,
        };
        if IS_STUCK.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        if claims.is_empty() && driver.has(Fault::RefusesEmptyCalls) {
            return Err(Status::invalid_argument("there is no claim"));
        }
        if driver.has(Fault::BusyWithMany) || driver.has(Fault::StuckAfterACancelledCall) {
            // Calls at once last until all have come, also on a busy machine.
            let milliseconds = if others > 4 { 1000 } else { 20 };
            tokio::time::sleep(Duration::from_millis(milliseconds)).await;
        }
        let mut entries = Entries::new();
        for claim in &claims {
            // The work is not cancelled when the caller is gone.
            let (driver, of) = (driver.clone(), claim.clone());
            let work = tokio::spawn(async move {
                match is_prepare {
                    true if driver.has(Fault::OneClaimAtATime) => driver.prepare_alone(&of).await,
                    true => driver.prepare(&of).await,
                    false => driver.unprepare(&of).await.map(|()| Vec::new()),
                }
            });
            let done = work
                .await
                .map_err(|error| Status::internal(error.to_string()))?;
            entries.push((
                claim.uid.clone(),
                done.map_err(|error| format!("{error:#}")),
            ));
        }
        let is_batch = claims.len() > 1;
        match driver.fault {
            Some(Fault::ForgetsAClaimOfSeveral) if is_batch => drop(entries.pop()),
            Some(Fault::AnswersForAStranger) if is_batch => {
                entries.push(("stranger".to_owned(), Ok(Vec::new())))
            }
            Some(Fault::AnswersTwice) if is_batch => entries.push(entries[0].clone()),
            Some(Fault::OneRefusalFailsAll) if is_batch => {
                if let Some((_, Err(error))) = entries.iter().find(|(_, one)| one.is_err()) {
                    return Err(Status::internal(error.clone()));
                }
            }
            _ => {}
        }
        under.is_done = true;
        Ok(entries)
    }

    fn request(&self, prepared: &Prepared) -> Vec<String> {
        let is_wrong = self.0.has(Fault::UnknownRequest);
        vec![if is_wrong {
            "other".to_owned()
        } else {
            prepared.request.clone()
        }]
    }
}

macro_rules! dra_version {
    ($version:ident, $is_old:literal, |$driver:ident, $from:ident| $device:expr) => {
        #[tonic::async_trait]
        impl dra::$version::dra_plugin_server::DraPlugin for Dra {
            async fn node_prepare_resources(
                &self,
                request: Request<dra::$version::NodePrepareResourcesRequest>,
            ) -> Result<Response<dra::$version::NodePrepareResourcesResponse>, Status> {
                use dra::$version::{NodePrepareResourceResponse, NodePrepareResourcesResponse};
                let claim = |c: dra::$version::Claim| Claim {
                    namespace: c.namespace,
                    name: c.name,
                    uid: c.uid,
                };
                let claims = request.into_inner().claims.into_iter().map(claim).collect();
                let entries = self.answer(true, claims).await?;
                let device = |$from: Prepared| {
                    let $driver = self;
                    $device
                };
                let one = |(uid, done): (String, Result<Vec<Prepared>, String>)| {
                    let answer = match done {
                        Ok(_) if $is_old && self.0.has(Fault::V1beta1Differs) => {
                            NodePrepareResourceResponse::default()
                        }
                        Ok(devices) => NodePrepareResourceResponse {
                            devices: devices.into_iter().map(device).collect(),
                            error: String::new(),
                        },
                        Err(error) => NodePrepareResourceResponse {
                            devices: Vec::new(),
                            error,
                        },
                    };
                    (uid, answer)
                };
                Ok(Response::new(
                    entries
                        .into_iter()
                        .map(one)
                        .collect::<NodePrepareResourcesResponse>(),
                ))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<dra::$version::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<dra::$version::NodeUnprepareResourcesResponse>, Status> {
                use dra::$version::{
                    NodeUnprepareResourceResponse, NodeUnprepareResourcesResponse,
                };
                let claim = |c: dra::$version::Claim| Claim {
                    namespace: c.namespace,
                    name: c.name,
                    uid: c.uid,
                };
                let claims: Vec<Claim> =
                    request.into_inner().claims.into_iter().map(claim).collect();
                let is_strict = $is_old && self.0.has(Fault::V1beta1RefusesToUnprepareTheUnknown);
                if is_strict && !claims.iter().all(|claim| self.0.knows(claim)) {
                    return Err(Status::not_found("the claim is not known"));
                }
                let entries = self.answer(false, claims).await?;
                let one = |(uid, done): (String, Result<Vec<Prepared>, String>)| {
                    (
                        uid,
                        NodeUnprepareResourceResponse {
                            error: done.err().unwrap_or_default(),
                        },
                    )
                };
                Ok(Response::new(
                    entries
                        .into_iter()
                        .map(one)
                        .collect::<NodeUnprepareResourcesResponse>(),
                ))
            }
        }
    };
}

dra_version!(v1, false, |driver, device| dra::v1::Device {
    request_names: driver.request(&device),
    cdi_device_ids: vec![driver.0.cdi_name(&device)],
    pool_name: device.pool,
    device_name: device.device,
    share_id: None,
});
dra_version!(v1beta1, true, |driver, device| dra::v1beta1::Device {
    request_names: driver.request(&device),
    cdi_device_ids: vec![driver.0.cdi_name(&device)],
    pool_name: device.pool,
    device_name: device.device,
});

pub(crate) struct Health {
    driver: Arc<Driver>,
    streams: AtomicUsize,
}

impl Health {
    pub(crate) fn new(driver: Arc<Driver>) -> Self {
        Self {
            driver,
            streams: AtomicUsize::new(0),
        }
    }
}

type HealthStream =
    Pin<Box<dyn Stream<Item = Result<dra_health::v1::NodeWatchResourcesResponse, Status>> + Send>>;

#[tonic::async_trait]
impl dra_health::v1::dra_resource_health_server::DraResourceHealth for Health {
    type NodeWatchResourcesStream = HealthStream;

    async fn node_watch_resources(
        &self,
        _: Request<dra_health::v1::NodeWatchResourcesRequest>,
    ) -> Result<Response<HealthStream>, Status> {
        use dra_health::v1 as wire;
        let before = self.streams.fetch_add(1, Ordering::SeqCst);
        let is_silent = self.driver.has(Fault::NoHealthList)
            || (self.driver.has(Fault::HealthListOnce) && before > 0);
        let stranger = self
            .driver
            .has(Fault::HealthOfAStranger)
            .then(|| "stranger".to_owned());
        let health = |name: String| wire::DeviceHealth {
            device: Some(wire::DeviceIdentifier {
                pool_name: slices::pool(&self.driver),
                device_name: name,
            }),
            health: wire::HealthStatus::Healthy.into(),
            ..wire::DeviceHealth::default()
        };
        let devices = slices::names(&self.driver)
            .into_iter()
            .chain(stranger)
            .map(health)
            .collect();
        let list = (!is_silent).then(|| Ok(wire::NodeWatchResourcesResponse { devices }));
        Ok(Response::new(Box::pin(
            stream::iter(list).chain(stream::pending()),
        )))
    }
}
