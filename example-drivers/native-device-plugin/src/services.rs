//! The gRPC services.

use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt, stream};
use nodedock_proto::kubelet::device_plugin::v1beta1 as api;
use nodedock_proto::kubelet::registration as reg;
use tokio_stream::wrappers::BroadcastStream;
use tonic::{Request, Response, Status};

use crate::script::{Choice, ScriptedOutcome};
use crate::{Event, PluginState};

#[derive(Clone)]
pub(crate) struct DevicePlugin(pub(crate) Arc<PluginState>);

impl DevicePlugin {
    /// Returns the container of a response; `None` for a response without a container.
    async fn carry_out(
        &self,
        mut answer: ScriptedOutcome,
    ) -> Result<Option<Box<api::ContainerAllocateResponse>>, Status> {
        while let ScriptedOutcome::After(when, then) = answer {
            when.notified().await;
            answer = *then;
        }
        match answer {
            ScriptedOutcome::Container(response) => Ok(Some(response)),
            ScriptedOutcome::NoResponse => Ok(None),
            ScriptedOutcome::Status(code, text) => Err(Status::new(code, text)),
            ScriptedOutcome::Hang | ScriptedOutcome::After(..) => std::future::pending().await,
            ScriptedOutcome::Die => {
                self.0.died.cancel();
                std::future::pending().await
            }
        }
    }
}

#[tonic::async_trait]
impl api::device_plugin_server::DevicePlugin for DevicePlugin {
    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<api::ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        self.0.tell(Event::OptionsAsked);
        let script = self.0.script();
        self.carry_out(script.options).await?;
        Ok(Response::new(api::DevicePluginOptions {
            pre_start_required: self.0.options.pre_start,
            get_preferred_allocation_available: script.choose.is_some(),
        }))
    }

    async fn list_and_watch(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        self.0.tell(Event::ListWatched);
        let (now, later) = self.0.lists();
        // Later lists replace one that a slow reader missed.
        let later = BroadcastStream::new(later).filter_map(|list| std::future::ready(list.ok()));
        let lists = stream::iter(now.map(Ok))
            .chain(later)
            .map(|list: Result<_, Status>| list.map(Arc::unwrap_or_clone));
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        let script = self.0.script();
        let choose = script
            .choose
            .ok_or_else(|| Status::unimplemented("nothing is preferred"))?;

        let mut container_responses = Vec::new();
        for request in request.into_inner().container_requests {
            let choice = Choice {
                available: request.available_device_ids,
                must_include: request.must_include_device_ids,
                size: request.allocation_size,
            };
            let device_ids = choose(&choice);
            self.0.tell(Event::Preferred(choice));
            container_responses.push(api::ContainerPreferredAllocationResponse { device_ids });
        }
        Ok(Response::new(api::PreferredAllocationResponse {
            container_responses,
        }))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        let (request_id, deadline) = (
            header(&request, "x-request-id"),
            header(&request, "grpc-timeout"),
        );
        let mut container_responses = Vec::new();
        for container in request.into_inner().container_requests {
            let devices = container.devices_ids;
            let answer = self.0.script().answer(&devices);
            let (request_id, deadline) = (request_id.clone(), deadline.clone());
            self.0.tell(Event::Allocate {
                devices,
                request_id,
                deadline,
            });
            container_responses.extend(self.carry_out(answer).await?.map(|response| *response));
        }
        Ok(Response::new(api::AllocateResponse {
            container_responses,
        }))
    }

    async fn pre_start_container(
        &self,
        request: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        let devices = request.into_inner().devices_ids;
        let answer = (self.0.script().pre_start)(&devices);
        self.0.tell(Event::PreStart { devices });
        self.carry_out(answer).await?;
        Ok(Response::new(api::PreStartContainerResponse {}))
    }
}

fn header<T>(request: &Request<T>, name: &str) -> Option<String> {
    request
        .metadata()
        .get(name)
        .and_then(|value| value.to_str().ok())
        .map(str::to_owned)
}

/// The service on a registration socket.
pub(crate) struct Registration(pub(crate) Arc<PluginState>);

#[tonic::async_trait]
impl reg::registration_server::Registration for Registration {
    async fn get_info(
        &self,
        _: Request<reg::InfoRequest>,
    ) -> Result<Response<reg::PluginInfo>, Status> {
        let options = &self.0.options;
        Ok(Response::new(reg::PluginInfo {
            r#type: "DevicePlugin".to_owned(),
            name: options.name(),
            endpoint: options
                .said_endpoint
                .clone()
                .unwrap_or_else(|| options.socket().display().to_string()),
            supported_versions: vec![options.version()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<reg::RegistrationStatus>,
    ) -> Result<Response<reg::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        self.0.tell(match status.plugin_registered {
            true => Event::Registered,
            false => Event::Refused { why: status.error },
        });
        Ok(Response::new(reg::RegistrationStatusResponse {}))
    }
}
