//! The device plugin API of one resource, as a kubelet calls it.

use std::pin::Pin;
use std::sync::Arc;

use futures::Stream;
use nodedock_proto::kubelet::device_plugin::v1beta1 as wire;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Request, Response, Status};
use wire::device_plugin_server::DevicePlugin;

use super::allocate::Allocations;
use super::offers::PoolOffer;
use crate::bridge::{Context, convert};
use nodedock_base::grpc::begin;
use nodedock_base::grpc::status;
use nodedock_base::tasks::Tasks;
use nodedock_model::{ExtendedResource, Problem, limit};

/// What is offered of a resource, as the kubelet is told of it.
pub(super) type CurrentOffer = watch::Sender<Arc<PoolOffer>>;

#[derive(Clone)]
pub(super) struct DevicePluginService {
    pub(super) resource: ExtendedResource,
    pub(super) current: Arc<CurrentOffer>,
    /// How many lists are followed.
    pub(super) following: Arc<watch::Sender<usize>>,
    pub(super) allocations: Arc<Allocations>,
    pub(super) context: Arc<Context>,
    /// Lists end with them.
    pub(super) tasks: Tasks,
}

/// Counts a list while it is followed.
struct FollowedList(Arc<watch::Sender<usize>>);

impl FollowedList {
    /// None: as many are followed as may be.
    fn begin(following: &Arc<watch::Sender<usize>>) -> Option<Self> {
        let begun = following.send_if_modified(|count| {
            let has_room = *count < limit::LISTS_AT_ONCE;
            *count += usize::from(has_room);
            has_room
        });
        begun.then(|| Self(following.clone()))
    }
}

impl Drop for FollowedList {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

type Answer<T> = Result<Response<T>, Status>;
type Lists = Pin<Box<dyn Stream<Item = Result<wire::ListAndWatchResponse, Status>> + Send>>;

impl DevicePluginService {
    /// The list as it is, and again at each change; of changes that come faster than they are sent the newest counts.
    fn lists(&self, followed: FollowedList) -> Lists {
        let mut offers = self.current.subscribe();
        offers.mark_changed();
        let state = (self.clone(), offers, followed, true);
        Box::pin(futures::stream::unfold(state, async |(service, mut offers, followed, is_first)| {
            let next = async {
                if !is_first {
                    // A kubelet writes its checkpoint for each list.
                    tokio::time::sleep(limit::LIST_PACE).await;
                }
                offers.changed().await.ok()
            };
            tokio::select! {
                // The kubelet learns by the end of its list that the resource is withdrawn.
                () = service.tasks.stopped() => return None,
                changed = next => changed?,
            }
            let message = convert::list(&offers.borrow_and_update().devices);
            service.context.metrics.listed(&service.resource);
            Some((Ok(message), (service, offers, followed, false)))
        }))
    }

    async fn answer(
        &self,
        request: wire::AllocateRequest,
        request_id: &Arc<str>,
    ) -> Result<wire::AllocateResponse, Problem> {
        let offer = self.current.borrow().clone();
        let mut container_responses = Vec::new();
        for ids in convert::allocate_request(request)? {
            let allocated = self.allocations.allocate(&self.resource, offer.clone(), ids, request_id.clone());
            container_responses.push(convert::container(allocated.await?));
        }
        Ok(wire::AllocateResponse { container_responses })
    }
}

#[tonic::async_trait]
impl DevicePlugin for DevicePluginService {
    type ListAndWatchStream = Lists;

    async fn get_device_plugin_options(
        &self,
        request: Request<wire::Empty>,
    ) -> Answer<wire::DevicePluginOptions> {
        begin("DevicePlugin.GetDevicePluginOptions", &request);
        Ok(Response::new(convert::options()))
    }

    async fn list_and_watch(&self, request: Request<wire::Empty>) -> Answer<Lists> {
        begin("DevicePlugin.ListAndWatch", &request);
        let followed = FollowedList::begin(&self.following).ok_or_else(|| {
            Status::resource_exhausted(format!("{} lists are followed already", limit::LISTS_AT_ONCE))
        })?;
        Ok(Response::new(self.lists(followed)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<wire::PreferredAllocationRequest>,
    ) -> Answer<wire::PreferredAllocationResponse> {
        begin("DevicePlugin.GetPreferredAllocation", &request);
        let containers = request.into_inner().container_requests;
        if containers.len() > limit::ALLOCATE_CONTAINERS_MAX {
            let max = limit::ALLOCATE_CONTAINERS_MAX;
            return Err(Status::invalid_argument(format!("more than {max} containers at once")));
        }
        let offer = self.current.borrow().clone();
        let preferred = containers.iter().map(|container| convert::preferred(&offer.devices, container));
        Ok(Response::new(wire::PreferredAllocationResponse { container_responses: preferred.collect() }))
    }

    async fn allocate(&self, request: Request<wire::AllocateRequest>) -> Answer<wire::AllocateResponse> {
        let (request_id, begun) = (begin("DevicePlugin.Allocate", &request), Instant::now());
        let answer = self.answer(request.into_inner(), &request_id).await;
        self.context.metrics.allocated(&self.resource, begun.elapsed(), answer.is_err());
        answer.map(Response::new).map_err(|problem| {
            let (resource, code) = (&self.resource, &problem.code);
            tracing::warn!(%resource, request = %request_id, code, %problem, "devices not allocated for the kubelet");
            status(&problem)
        })
    }

    /// Not called by the options of the plugin, and harmless.
    async fn pre_start_container(
        &self,
        request: Request<wire::PreStartContainerRequest>,
    ) -> Answer<wire::PreStartContainerResponse> {
        begin("DevicePlugin.PreStartContainer", &request);
        Ok(Response::new(wire::PreStartContainerResponse {}))
    }
}
