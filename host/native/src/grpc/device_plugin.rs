//! A device plugin as a `DeviceDriver`: one connection, from its start to its end. The device manager decides whether there is
//! another.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use futures::{FutureExt, StreamExt};
use nodedock_proto::kubelet::device_plugin::v1beta1 as wire;
use nodedock_proto::prost::Message;
use serde::Serialize;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

use super::connection::dial;
use super::convert::device_plugin::List;
use super::tap::Exchange;
use super::{PluginTimes, Tap, clean, convert, problem, rpc};
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::{Call, DeviceDriver, DeviceLists, DeviceOptions};
use nodedock_model::{
    ContainerAllocation, ExtendedResource, PluginDevice, Problem, ProblemCode, limit,
};

/// The path of the call whose stream are the lists.
const LISTS: &str = "/v1beta1.DevicePlugin/ListAndWatch";

type Client = wire::device_plugin_client::DevicePluginClient<Channel>;

/// A plugin's stream of lists.
pub struct Following {
    pub lists: DeviceLists,
    /// Why the stream ended, after the last list. An error means that the tasks stopped.
    pub end: oneshot::Receiver<Problem>,
}

/// A device plugin on one connection. Its calls fail when the connection is lost.
pub struct DevicePlugin {
    /// Name of the plugin in problems.
    peer: Arc<str>,
    client: Client,
    channel: Channel,
    options: DeviceOptions,
    tap: Tap,
    tasks: Tasks,
}

impl DevicePlugin {
    /// Connects, and calls the plugin for its options. Streams end with the tasks.
    pub async fn connect(
        resource: &ExtendedResource,
        socket: &Path,
        times: PluginTimes,
        tap: Tap,
        tasks: &Tasks,
    ) -> Result<Self, Problem> {
        let peer: Arc<str> = format!("device plugin {resource}").into();
        let (channel, _ended) = dial(socket, times.dial).await.map_err(|error| {
            let message = clean(&format!("{peer}: {}", chain(&error)));
            Problem::unavailable(ProblemCode::DriverNotConnected, message)
        })?;
        let mut client =
            Client::new(channel.clone()).max_decoding_message_size(limit::PLUGIN_ANSWER_BYTES_MAX);
        let call = Call {
            request_id: nodedock_base::request::new_id(),
            deadline: times.options,
        };
        let exchange = tap.begin(&call.request_id, "GetDevicePluginOptions", &wire::Empty {});
        let asked = client.get_device_plugin_options(rpc::request(&call, wire::Empty {}));
        let options = convert::device_plugin::options(within(&peer, &call, exchange, asked).await?);
        Ok(Self {
            peer,
            client,
            channel,
            options,
            tap,
            tasks: tasks.clone(),
        })
    }

    /// Opens a stream of lists.
    pub fn follow(&self, request_id: Arc<str>) -> Following {
        let (sender, lists) = watch::channel(None);
        let (ended, end) = oneshot::channel();
        let (channel, peer, tap) = (self.channel.clone(), self.peer.clone(), self.tap.clone());
        // Safe to drop: the next start opens the list again.
        self.tasks.spawn_until_stopped("device-lists", async move {
            tokio::select! {
                // The receiver is gone.
                () = sender.closed() => {}
                problem = read(channel, &peer, &request_id, &tap, &sender) => {
                    // A watcher may use only the lists.
                    let _ = ended.send(problem);
                }
            }
        });
        Following { lists, end }
    }

    fn not_valid(&self, why: &str) -> Problem {
        problem::not_valid(&self.peer, why)
    }
}

#[async_trait]
impl DeviceDriver for DevicePlugin {
    fn options(&self) -> DeviceOptions {
        self.options
    }

    /// Returns at once: plugins in Go send no headers before their first list.
    async fn list_and_watch(&self, call: &Call) -> Result<DeviceLists, Problem> {
        Ok(self.follow(call.request_id.clone()).lists)
    }

    async fn allocate(
        &self,
        call: &Call,
        device_ids: &[String],
    ) -> Result<ContainerAllocation, Problem> {
        let message = convert::device_plugin::allocate_request(device_ids);
        let mut client = self.client.clone();
        let exchange = self.tap.begin(&call.request_id, "Allocate", &message);
        let answer = within(
            &self.peer,
            call,
            exchange,
            client.allocate(rpc::request(call, message)),
        )
        .await?;
        convert::device_plugin::allocation(answer).map_err(|why| self.not_valid(&why))
    }

    async fn preferred_allocation(
        &self,
        call: &Call,
        available: &[String],
        must_include: &[String],
        size: u32,
    ) -> Result<Vec<String>, Problem> {
        let message = convert::device_plugin::preferred_request(available, must_include, size);
        let mut client = self.client.clone();
        let exchange = self
            .tap
            .begin(&call.request_id, "GetPreferredAllocation", &message);
        let asked = client.get_preferred_allocation(rpc::request(call, message));
        let answer = within(&self.peer, call, exchange, asked).await?;
        convert::device_plugin::preferred(answer).map_err(|why| self.not_valid(&why))
    }

    async fn pre_start(&self, call: &Call, device_ids: &[String]) -> Result<(), Problem> {
        let deadline = call.deadline.min(limit::PRE_START);
        let call = Call {
            request_id: call.request_id.clone(),
            deadline,
        };
        let message = wire::PreStartContainerRequest {
            devices_ids: device_ids.to_vec(),
        };
        let mut client = self.client.clone();
        let exchange = self
            .tap
            .begin(&call.request_id, "PreStartContainer", &message);
        let asked = client.pre_start_container(rpc::request(&call, message));
        within(&self.peer, &call, exchange, asked).await.map(drop)
    }
}

async fn within<T: Message + Serialize>(
    peer: &str,
    call: &Call,
    exchange: Option<Exchange>,
    work: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Problem> {
    let ended = tokio::time::timeout(call.deadline, work).await;
    let ended = ended.map(|answer| answer.map(Response::into_inner));
    if let Some(exchange) = exchange {
        exchange.ended(&ended);
    }
    problem::of_call(peer, call.deadline, ended)
}

/// Reads a stream to its end and returns the reason.
async fn read(
    channel: Channel,
    peer: &str,
    request_id: &str,
    tap: &Tap,
    lists: &watch::Sender<Option<Arc<[PluginDevice]>>>,
) -> Problem {
    let asked = rpc::named(request_id, Request::new(wire::Empty {}));
    let mut stream = match rpc::stream(
        channel,
        LISTS.to_owned(),
        asked,
        limit::PLUGIN_LIST_BYTES_MAX,
    )
    .await
    {
        Ok(stream) => stream,
        Err(status) => return problem::of_status(peer, &status),
    };
    loop {
        let (newest, end) = newest(&mut stream).await;
        if let Some(list) = newest {
            tap.received(request_id, "ListAndWatch", list.wire());
            match convert::device_plugin::listed(list) {
                Ok(listed) => lists.send_replace(Some(listed)),
                Err(why) => return problem::not_valid(peer, &why),
            };
        }
        match end {
            None => tokio::time::sleep(limit::LIST_PACE).await,
            Some(Ok(())) => {
                return Problem::unavailable(
                    ProblemCode::DriverUnavailable,
                    format!("{peer} ended its list of devices"),
                );
            }
            Some(Err(status)) => return problem::of_status(peer, &status),
        }
    }
}

/// Waits for a list and skips received lists before the newest. Also returns whether the stream has ended.
async fn newest(stream: &mut Streaming<List>) -> (Option<List>, Option<Result<(), Status>>) {
    let mut newest = None;
    let mut next = stream.next().await;
    // Otherwise a plugin that lists faster than it is read would never be reported.
    let until = Instant::now() + limit::LIST_PACE;
    loop {
        match next {
            None => return (newest, Some(Ok(()))),
            Some(Err(status)) => return (newest, Some(Err(status))),
            Some(Ok(list)) => newest = Some(list),
        }
        if Instant::now() >= until {
            return (newest, None);
        }
        match stream.next().now_or_never() {
            Some(after) => next = after,
            None => return (newest, None),
        }
    }
}

#[cfg(test)]
mod tests;
