//! The gRPC services.

use std::pin::Pin;
use std::sync::{Arc, PoisonError};

use futures::Stream;
use nodedock_proto::kubelet::{dra, dra_health, registration as reg};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status};

use crate::script::{Claim, Device, DeviceHealth, HealthState, Operation, ScriptedOutcome};
use crate::{Event, PluginState};

pub(crate) struct Registration(pub(crate) Arc<PluginState>);

#[tonic::async_trait]
impl reg::registration_server::Registration for Registration {
    async fn get_info(
        &self,
        _: Request<reg::InfoRequest>,
    ) -> Result<Response<reg::PluginInfo>, Status> {
        let options = &self.0.options;
        self.0.tell(Event::Asked);
        Ok(Response::new(reg::PluginInfo {
            r#type: options.plugin_type.clone(),
            name: options.driver.clone(),
            endpoint: options
                .said_endpoint
                .clone()
                .unwrap_or_else(|| options.endpoint.display().to_string()),
            supported_versions: options.services(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<reg::RegistrationStatus>,
    ) -> Result<Response<reg::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        let failure = self
            .0
            .notify_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let failure = failure.filter(|_| status.plugin_registered);
        self.0
            .tell(Event::Notified(status.plugin_registered, status.error));
        match failure {
            Some(text) => Err(Status::unknown(text)),
            None => Ok(Response::new(reg::RegistrationStatusResponse {})),
        }
    }
}

#[derive(Clone)]
pub(crate) struct Dra(pub(crate) Arc<PluginState>);

/// Creates the entries of the response, in the order of the claims. A claim may have two entries, or none.
type Entries = Vec<(String, Result<Vec<Device>, String>)>;

impl Dra {
    async fn answer<T>(
        &self,
        operation: Operation,
        service: &'static str,
        request: &Request<T>,
        claims: Vec<Claim>,
    ) -> Result<Entries, Status> {
        self.0.tell(Event::Called {
            operation,
            service,
            claims: claims.clone(),
            request_id: header(request, "x-request-id").unwrap_or_default(),
            deadline: header(request, "grpc-timeout"),
        });
        let script = self.0.script();
        let mut entries = Entries::new();
        for claim in claims {
            self.carry_out(script.decide(operation, &claim), claim.uid, &mut entries)
                .await?;
        }
        Ok(entries)
    }

    async fn carry_out(
        &self,
        mut answer: ScriptedOutcome,
        uid: String,
        entries: &mut Entries,
    ) -> Result<(), Status> {
        while let ScriptedOutcome::After(when, then) = answer {
            when.notified().await;
            answer = *then;
        }
        match answer {
            ScriptedOutcome::Devices(devices) => entries.push((uid, Ok(devices))),
            ScriptedOutcome::Error(text) => entries.push((uid, Err(text))),
            ScriptedOutcome::Skip => {}
            ScriptedOutcome::Twice(devices) => {
                entries.extend([(uid.clone(), Ok(devices.clone())), (uid, Ok(devices))])
            }
            ScriptedOutcome::Stranger(stranger, devices) => {
                entries.extend([(stranger, Ok(devices.clone())), (uid, Ok(devices))]);
            }
            ScriptedOutcome::Instead(stranger, devices) => entries.push((stranger, Ok(devices))),
            ScriptedOutcome::Huge(bytes) => entries.push((uid, Err("x".repeat(bytes)))),
            ScriptedOutcome::Status(code, text) => return Err(Status::new(code, text)),
            ScriptedOutcome::Hang | ScriptedOutcome::After(..) => std::future::pending().await,
            ScriptedOutcome::Die => {
                self.0.died.cancel();
                std::future::pending().await
            }
        }
        Ok(())
    }
}

fn header<T>(request: &Request<T>, name: &str) -> Option<String> {
    request
        .metadata()
        .get(name)
        .and_then(|value| value.to_str().ok())
        .map(str::to_owned)
}

macro_rules! dra_version {
    ($version:ident, $name:literal, |$from:ident| $device:expr) => {
        #[tonic::async_trait]
        impl dra::$version::dra_plugin_server::DraPlugin for Dra {
            async fn node_prepare_resources(
                &self,
                request: Request<dra::$version::NodePrepareResourcesRequest>,
            ) -> Result<Response<dra::$version::NodePrepareResourcesResponse>, Status> {
                use dra::$version::{
                    Device, NodePrepareResourceResponse, NodePrepareResourcesResponse,
                };
                let claims = request.get_ref().claims.iter();
                let claims = claims
                    .map(|c| claim(&c.namespace, &c.name, &c.uid))
                    .collect();
                let entries = self
                    .answer(Operation::Prepare, $name, &request, claims)
                    .await?;
                Ok(Response::new(
                    entries
                        .into_iter()
                        .map(|(uid, result)| {
                            let (devices, error) = match result {
                                Ok(devices) => (devices, String::new()),
                                Err(error) => (Vec::new(), error),
                            };
                            let devices = devices
                                .into_iter()
                                .map(|$from: crate::Device| -> Device { $device })
                                .collect();
                            (uid, NodePrepareResourceResponse { devices, error })
                        })
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
                let claims = request.get_ref().claims.iter();
                let claims = claims
                    .map(|c| claim(&c.namespace, &c.name, &c.uid))
                    .collect();
                let entries = self
                    .answer(Operation::Unprepare, $name, &request, claims)
                    .await?;
                Ok(Response::new(
                    entries
                        .into_iter()
                        .map(|(uid, result)| {
                            (
                                uid,
                                NodeUnprepareResourceResponse {
                                    error: result.err().unwrap_or_default(),
                                },
                            )
                        })
                        .collect::<NodeUnprepareResourcesResponse>(),
                ))
            }
        }
    };
}

dra_version!(v1, "v1", |device| Device {
    request_names: device.requests,
    pool_name: device.pool,
    device_name: device.device,
    cdi_device_ids: device.cdi_names,
    share_id: device.share_id,
});
dra_version!(v1beta1, "v1beta1", |device| Device {
    request_names: device.requests,
    pool_name: device.pool,
    device_name: device.device,
    cdi_device_ids: device.cdi_names,
});

#[derive(Clone)]
pub(crate) struct Health(pub(crate) Arc<PluginState>);

macro_rules! health_version {
    ($version:ident, $name:literal) => {
        #[tonic::async_trait]
        impl dra_health::$version::dra_resource_health_server::DraResourceHealth for Health {
            type NodeWatchResourcesStream = Pin<
                Box<
                    dyn Stream<
                            Item = Result<dra_health::$version::NodeWatchResourcesResponse, Status>,
                        > + Send,
                >,
            >;

            async fn node_watch_resources(
                &self,
                _: Request<dra_health::$version::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                use dra_health::$version as wire;
                self.0.tell(Event::HealthWatched($name));
                let device = |health: DeviceHealth| wire::DeviceHealth {
                    device: Some(wire::DeviceIdentifier {
                        pool_name: health.pool,
                        device_name: health.device,
                    }),
                    health: match health.state {
                        HealthState::Unknown => wire::HealthStatus::Unknown.into(),
                        HealthState::Healthy => wire::HealthStatus::Healthy.into(),
                        HealthState::Unhealthy => wire::HealthStatus::Unhealthy.into(),
                    },
                    last_updated_time: 0,
                    health_check_timeout_seconds: health.timeout_seconds,
                    message: health.message,
                };
                let reports = WatchStream::new(self.0.health.subscribe()).map(move |devices| {
                    Ok(wire::NodeWatchResourcesResponse {
                        devices: devices.into_iter().map(device).collect(),
                    })
                });
                Ok(Response::new(Box::pin(reports)))
            }
        }
    };
}

health_version!(v1, "v1");
health_version!(v1alpha1, "v1alpha1");

fn claim(namespace: &str, name: &str, uid: &str) -> Claim {
    Claim {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: uid.to_owned(),
    }
}
