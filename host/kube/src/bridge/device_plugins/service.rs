//! The device plugin API of one resource, as a kubelet calls it.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use nodedock_proto::kubelet::device_plugin::v1beta1 as wire;
use tokio::time::Instant;
use tonic::{Request, Response, Status};
use wire::device_plugin_server::DevicePlugin;

use super::OfferedResource;
use super::allocate::Allocate;
use crate::bridge::convert;
use nodedock_base::grpc::{begin, status};
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::{Call, DeviceDriver};
use nodedock_core::manager::devices::Question;
use nodedock_model::{OfferSource, Problem, ProblemCode, ResourceOffer, limit};

/// Concurrent lists of one resource: a kubelet has one, or two while it registers again.
const LISTS_AT_ONCE: usize = 16;

pub(super) struct DevicePluginService {
    pub(super) resource: Arc<OfferedResource>,
    /// Lists end with them.
    pub(super) tasks: Tasks,
}

/// Counts a list while it is open.
struct OpenList(Arc<OfferedResource>);

impl OpenList {
    /// None: as many are open as may be.
    fn begin(resource: &Arc<OfferedResource>) -> Option<Self> {
        let begun = resource.lists.send_if_modified(|count| {
            let has_room = *count < LISTS_AT_ONCE;
            *count += usize::from(has_room);
            has_room
        });
        begun.then(|| Self(resource.clone()))
    }
}

impl Drop for OpenList {
    fn drop(&mut self) {
        self.0.lists.send_modify(|count| *count -= 1);
    }
}

type RpcResult<T> = Result<Response<T>, Status>;
type Lists = Pin<Box<dyn Stream<Item = Result<wire::ListAndWatchResponse, Status>> + Send>>;

/// The list as it is, and again at each change; of changes that come faster than they are sent the newest counts.
fn lists(open: OpenList) -> impl Stream<Item = Result<wire::ListAndWatchResponse, Status>> + Send {
    let mut offers = open.0.offer.subscribe();
    offers.mark_changed();
    futures::stream::unfold(
        (open, offers, Instant::now()),
        async |(open, mut offers, next)| {
            tokio::time::sleep_until(next).await;
            // no error: the offers end with the plugin
            offers.changed().await.ok()?;
            let message = convert::list(&offers.borrow_and_update().devices);
            open.0.context.metrics.listed(&open.0.name);
            // A kubelet writes its checkpoint for each list.
            Some((
                Ok(message),
                (open, offers, Instant::now() + limit::LIST_PACE),
            ))
        },
    )
}

fn call(request_id: &Arc<str>, deadline: Duration) -> Call {
    Call {
        request_id: request_id.clone(),
        deadline,
    }
}

impl DevicePluginService {
    fn offer(&self) -> Arc<ResourceOffer> {
        self.resource.offer.borrow().clone()
    }

    /// The native device plugin of the resource. After a restart it is offered before it has registered again: it is waited for.
    async fn plugin(&self) -> Result<Arc<dyn DeviceDriver>, Problem> {
        let (context, resource) = (&self.resource.context, &self.resource.name);
        let manager = context.manager()?;
        let mut changes = manager.devices.changes();
        let arrived = async {
            loop {
                match manager.devices.plugin(resource) {
                    Some(plugin) => return plugin,
                    // The sender is part of the manager.
                    None => drop(changes.changed().await),
                }
            }
        };
        let arrived = tokio::time::timeout(limit::DRIVER_WAIT, arrived).await;
        arrived.map_err(|_| {
            let message = format!("the device plugin of {resource} is not connected");
            Problem::unavailable(ProblemCode::DriverUnavailable, message)
        })
    }

    /// The devices that the plugin prefers, for each container. A kubelet refuses a pod for an error, and chooses itself if there are none.
    async fn preferred_by_plugin(
        &self,
        containers: Vec<wire::ContainerPreferredAllocationRequest>,
        request_id: &Arc<str>,
    ) -> Vec<wire::ContainerPreferredAllocationResponse> {
        // After a restart it may register a moment later.
        let asked = match self.plugin().await {
            Ok(_) => self.resource.context.manager(),
            Err(problem) => Err(problem),
        };
        if let Err(problem) = &asked {
            let resource = &self.resource.name;
            tracing::info!(%resource, request = %request_id, %problem, "a kubelet gets no preference");
        }
        let mut preferred = Vec::new();
        for container in containers {
            let mut available = container.available_device_ids;
            available.sort_unstable();
            let size = usize::try_from(container.allocation_size).unwrap_or(0);
            let question = Question {
                available,
                must_include: container.must_include_device_ids,
                size,
            };
            let deadline = Instant::now() + limit::CLAIM_CALL_DEADLINE;
            let device_ids = match &asked {
                Ok(manager) => {
                    manager
                        .devices
                        .preferred(&self.resource.name, request_id, &question, deadline)
                        .await
                }
                Err(_) => Vec::new(),
            };
            preferred.push(wire::ContainerPreferredAllocationResponse { device_ids });
        }
        preferred
    }

    async fn answer(
        &self,
        request: wire::AllocateRequest,
        request_id: &Arc<str>,
    ) -> Result<wire::AllocateResponse, Problem> {
        let offer = self.offer();
        let mut container_responses = Vec::new();
        for ids in convert::allocate_request(request)? {
            let (resource, request_id) = (self.resource.clone(), request_id.clone());
            container_responses.push(match offer.source.driver().cloned() {
                Some(driver) => {
                    let allocate = Allocate {
                        resource,
                        driver,
                        ids,
                        request_id,
                    };
                    convert::container(allocate.run().await?)
                }
                None => {
                    let unknown = ids
                        .iter()
                        .find(|id| offer.devices.iter().all(|device| device.id != **id));
                    if let Some(unknown) = unknown {
                        let message = format!(
                            "{} is no device of {}",
                            convert::shown(unknown),
                            resource.name
                        );
                        return Err(Problem::not_found(ProblemCode::DeviceUnknown, message));
                    }
                    let ids: Vec<_> = ids.into_iter().collect();
                    let call = call(&request_id, limit::CLAIM_CALL_DEADLINE);
                    convert::container_of_plugin(self.plugin().await?.allocate(&call, &ids).await?)
                }
            });
        }
        Ok(wire::AllocateResponse {
            container_responses,
        })
    }
}

#[tonic::async_trait]
impl DevicePlugin for DevicePluginService {
    type ListAndWatchStream = Lists;

    async fn get_device_plugin_options(
        &self,
        request: Request<wire::Empty>,
    ) -> RpcResult<wire::DevicePluginOptions> {
        begin("DevicePlugin.GetDevicePluginOptions", &request);
        Ok(Response::new(convert::options(
            self.offer().source.options(),
        )))
    }

    async fn list_and_watch(&self, request: Request<wire::Empty>) -> RpcResult<Lists> {
        begin("DevicePlugin.ListAndWatch", &request);
        let open = OpenList::begin(&self.resource).ok_or_else(|| {
            Status::resource_exhausted(format!("{} lists are followed already", LISTS_AT_ONCE))
        })?;
        // The kubelet learns by the end of its list that the resource is withdrawn.
        Ok(Response::new(Box::pin(
            lists(open).take_until(self.tasks.stopped()),
        )))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<wire::PreferredAllocationRequest>,
    ) -> RpcResult<wire::PreferredAllocationResponse> {
        let request_id = begin("DevicePlugin.GetPreferredAllocation", &request);
        let containers = request.into_inner().container_requests;
        if containers.len() > limit::ALLOCATE_CONTAINERS_MAX {
            let max = limit::ALLOCATE_CONTAINERS_MAX;
            return Err(Status::invalid_argument(format!(
                "more than {max} containers at once"
            )));
        }
        let offer = self.offer();
        let container_responses = match offer.source {
            OfferSource::Driver(_) => containers
                .iter()
                .map(|container| convert::preferred(&offer.devices, container))
                .collect(),
            OfferSource::Plugin(_) => self.preferred_by_plugin(containers, &request_id).await,
        };
        Ok(Response::new(wire::PreferredAllocationResponse {
            container_responses,
        }))
    }

    async fn allocate(
        &self,
        request: Request<wire::AllocateRequest>,
    ) -> RpcResult<wire::AllocateResponse> {
        let (request_id, begun) = (begin("DevicePlugin.Allocate", &request), Instant::now());
        let answer = self.answer(request.into_inner(), &request_id).await;
        let resource = &self.resource.name;
        self.resource
            .context
            .metrics
            .allocated(resource, begun.elapsed(), answer.is_err());
        answer.map(Response::new).map_err(|problem| {
            let code = &problem.code;
            tracing::warn!(%resource, request = %request_id, code, %problem, "devices not allocated for the kubelet");
            status(&problem)
        })
    }

    /// Forwards the call to a native device plugin. Does nothing for devices in pools: the kubelet does not call it for them, by the
    /// options of the plugin.
    async fn pre_start_container(
        &self,
        request: Request<wire::PreStartContainerRequest>,
    ) -> RpcResult<wire::PreStartContainerResponse> {
        let request_id = begin("DevicePlugin.PreStartContainer", &request);
        if let OfferSource::Plugin(_) = self.offer().source {
            let ids = request.into_inner().devices_ids;
            let started = async {
                self.plugin()
                    .await?
                    .pre_start(&call(&request_id, limit::PRE_START), &ids)
                    .await
            };
            started.await.map_err(|problem| status(&problem))?;
        }
        Ok(Response::new(wire::PreStartContainerResponse {}))
    }
}
