//! The device plugin API of one resource, as a kubelet calls it.

use std::pin::Pin;
use std::sync::Arc;

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
use nodedock_model::{Problem, limit};

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

type Answer<T> = Result<Response<T>, Status>;
type Lists = Pin<Box<dyn Stream<Item = Result<wire::ListAndWatchResponse, Status>> + Send>>;

/// The list as it is, and again at each change; of changes that come faster than they are sent the newest counts.
fn lists(open: OpenList) -> impl Stream<Item = Result<wire::ListAndWatchResponse, Status>> + Send {
    let mut offers = open.0.offer.subscribe();
    offers.mark_changed();
    futures::stream::unfold((open, offers, Instant::now()), async |(open, mut offers, next)| {
        tokio::time::sleep_until(next).await;
        offers.changed().await.ok()?;
        let message = convert::list(&offers.borrow_and_update().devices);
        open.0.context.metrics.listed(&open.0.name);
        // A kubelet writes its checkpoint for each list.
        Some((Ok(message), (open, offers, Instant::now() + limit::LIST_PACE)))
    })
}

impl DevicePluginService {
    async fn answer(
        &self,
        request: wire::AllocateRequest,
        request_id: &Arc<str>,
    ) -> Result<wire::AllocateResponse, Problem> {
        let offer = self.resource.offer.borrow().clone();
        let mut container_responses = Vec::new();
        for ids in convert::allocate_request(request)? {
            let (resource, offer, request_id) = (self.resource.clone(), offer.clone(), request_id.clone());
            let allocated = Allocate { resource, offer, ids, request_id }.run().await?;
            container_responses.push(convert::container(allocated));
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
        let open = OpenList::begin(&self.resource).ok_or_else(|| {
            Status::resource_exhausted(format!("{} lists are followed already", LISTS_AT_ONCE))
        })?;
        // The kubelet learns by the end of its list that the resource is withdrawn.
        Ok(Response::new(Box::pin(lists(open).take_until(self.tasks.stopped()))))
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
        let offer = self.resource.offer.borrow().clone();
        let preferred = containers.iter().map(|container| convert::preferred(&offer.devices, container));
        Ok(Response::new(wire::PreferredAllocationResponse { container_responses: preferred.collect() }))
    }

    async fn allocate(&self, request: Request<wire::AllocateRequest>) -> Answer<wire::AllocateResponse> {
        let (request_id, begun) = (begin("DevicePlugin.Allocate", &request), Instant::now());
        let answer = self.answer(request.into_inner(), &request_id).await;
        let resource = &self.resource.name;
        self.resource.context.metrics.allocated(resource, begun.elapsed(), answer.is_err());
        answer.map(Response::new).map_err(|problem| {
            let code = &problem.code;
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
