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
use super::convert;
use super::counters::Counters;
use super::offer::PoolOffer;
use nodedock_base::grpc::begin;
use nodedock_base::grpc::status;
use nodedock_base::tasks::Tasks;
use nodedock_model::{ExtendedResource, limit};

/// What is offered of a resource, as the kubelet is told of it.
pub(super) type Current = watch::Sender<Arc<PoolOffer>>;

#[derive(Clone)]
pub(super) struct Face {
    pub(super) resource: ExtendedResource,
    pub(super) current: Arc<Current>,
    /// How many lists are followed.
    pub(super) following: Arc<watch::Sender<usize>>,
    pub(super) allocations: Arc<Allocations>,
    pub(super) counters: Arc<Counters>,
    /// Lists end with them.
    pub(super) tasks: Tasks,
}

/// A list that is followed, counted while it is.
struct Followed(Arc<watch::Sender<usize>>);

impl Followed {
    /// None: there are as many as there may be.
    fn begin(following: &Arc<watch::Sender<usize>>) -> Option<Self> {
        let begun = following.send_if_modified(|count| {
            let has_room = *count < limit::LISTS_AT_ONCE;
            *count += usize::from(has_room);
            has_room
        });
        begun.then(|| Self(following.clone()))
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

type Answer<T> = Result<Response<T>, Status>;
type Lists = Pin<Box<dyn Stream<Item = Result<wire::ListAndWatchResponse, Status>> + Send>>;

impl Face {
    /// The list as it is, and again at each change; of changes that come faster than they are sent the newest counts.
    fn lists(&self, followed: Followed) -> Lists {
        let mut offers = self.current.subscribe();
        offers.mark_changed();
        let (tasks, counters, resource) = (self.tasks.clone(), self.counters.clone(), self.resource.clone());
        let state = (offers, followed, true);
        Box::pin(futures::stream::unfold(state, move |(mut offers, followed, is_first)| {
            let (tasks, counters, resource) = (tasks.clone(), counters.clone(), resource.clone());
            async move {
                let next = async {
                    if !is_first {
                        // A kubelet writes its checkpoint for each list.
                        tokio::time::sleep(limit::LIST_PACE).await;
                    }
                    offers.changed().await.ok()
                };
                tokio::select! {
                    // The kubelet learns by the end of its list that we go.
                    () = tasks.stopped() => return None,
                    more = next => more?,
                }
                let message = convert::list(&offers.borrow_and_update().devices);
                counters.listed(&resource);
                Some((Ok(message), (offers, followed, false)))
            }
        }))
    }

    async fn answer(
        &self,
        request: wire::AllocateRequest,
        request_id: Arc<str>,
    ) -> Result<wire::AllocateResponse, nodedock_model::Problem> {
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
impl DevicePlugin for Face {
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
        let followed = Followed::begin(&self.following).ok_or_else(|| {
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
        let answer = self.answer(request.into_inner(), request_id.clone()).await;
        self.counters.allocated(&self.resource, begun.elapsed(), answer.is_ok());
        answer.map(Response::new).map_err(|problem| {
            let (resource, code) = (&self.resource, &problem.code);
            tracing::warn!(%resource, request = %request_id, code, %problem, "devices not allocated for the kubelet");
            status(&problem)
        })
    }

    /// Never asked for by our options; one who asks is told that all is well.
    async fn pre_start_container(
        &self,
        request: Request<wire::PreStartContainerRequest>,
    ) -> Answer<wire::PreStartContainerResponse> {
        begin("DevicePlugin.PreStartContainer", &request);
        Ok(Response::new(wire::PreStartContainerResponse {}))
    }
}
