//! Clients' bytes as chance has them.

use proptest::prelude::*;

use super::*;

/// A valid stream of frames; references to the dynamic table occur as soon as there is something in it.
fn conversation() -> impl Strategy<Value = Vec<u8>> {
    let field = prop_oneof![
        Just(vec![0x83]),
        ("[a-z]{1,20}", "[ -~]{0,40}").prop_map(|(name, value)| remembered(&name, &value)),
        ("[a-z]{1,20}", "[ -~]{0,300}").prop_map(|(name, value)| plain(&name, &value)),
        "[ -~]{0,40}".prop_map(|value| remembered(":authority", &value)),
        Just(vec![0xbe]),
    ];
    let block = prop::collection::vec(field, 0..6).prop_map(|fields| fields.concat());
    let frames = prop_oneof![
        (any::<u8>(), prop::collection::vec(any::<u8>(), 0..400))
            .prop_map(|(flags, data)| frame(DATA, flags, 1, &data)),
        (prop_oneof![Just(PING), 0x0a..=0xff_u8], any::<u8>())
            .prop_map(|(kind, flags)| frame(kind, flags, 0, &[5; 8])),
        (block, any::<bool>(), 0..4_u8, 1..50_usize).prop_map(|(block, end, padding, piece)| {
            let flags = PADDED | if end { END_STREAM } else { 0 };
            let first = [&[padding][..], &vec![0; usize::from(padding)]].concat();
            let mut frames = frame(HEADERS, flags, 1, &first);
            for chunk in block.chunks(piece) {
                frames.extend(frame(CONTINUATION, 0, 1, chunk));
            }
            frames.extend(frame(CONTINUATION, END_HEADERS, 1, &[]));
            frames
        }),
    ];
    let first = headers(1, &request(GO));
    prop::collection::vec(frames, 0..12)
        .prop_map(move |rest| [opening(), first.clone(), rest.concat()].concat())
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(future)
}

proptest! {
    #[test]
    fn how_bytes_are_cut_changes_nothing(
        input in conversation(),
        written in prop::collection::vec(1..300_usize, 1..20),
        read in prop::collection::vec(1..200_usize, 1..20),
    ) {
        let expected = rewritten(&input).unwrap();
        let output = block_on(async {
            let (mut client, server) = duplex(200);
            let mut connection = Connection::new(server);
            let writer = async {
                let (mut rest, mut sizes) = (&input[..], written.iter().cycle());
                while !rest.is_empty() {
                    let (chunk, after) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
                    client.write_all(chunk).await.unwrap();
                    tokio::task::yield_now().await;
                    rest = after;
                }
                client.shutdown().await.unwrap();
            };
            let reader = async {
                let (mut output, mut sizes) = (Vec::new(), read.iter().cycle());
                loop {
                    let mut buffer = vec![0; *sizes.next().unwrap()];
                    let length = connection.read(&mut buffer).await.unwrap();
                    if length == 0 {
                        return output;
                    }
                    output.extend_from_slice(&buffer[..length]);
                }
            };
            tokio::join!(writer, reader).1
        });
        prop_assert_eq!(output, expected);
    }

    #[test]
    fn no_frames_make_it_panic(
        frames in prop::collection::vec(
            (0..12_u8, any::<u8>(), 0..3_u32, prop::collection::vec(any::<u8>(), 0..40)), 0..20),
        cut in 1..60_usize,
    ) {
        let (mut inbound, mut out) = (Inbound::default(), BytesMut::new());
        let frames = frames.iter().map(|(kind, flags, stream, payload)| frame(*kind, *flags, *stream, payload));
        let input = [opening(), frames.collect::<Vec<_>>().concat()].concat();
        let _ = input.chunks(cut).try_for_each(|chunk| feed(&mut inbound, chunk, &mut out));
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..500)) {
        let _ = rewritten(&[PREFACE, &bytes].concat());
        let _ = rewritten(&bytes);
    }

    /// `h2`'s own client: its table, its Huffman codes.
    #[test]
    fn h2_requests_arrive_unchanged(
        requests in prop::collection::vec(
            prop::collection::vec(("x-[a-e]", prop::collection::vec(0x20..=0xff_u8, 0..80)), 0..12), 1..6),
    ) {
        let requests: Vec<_> = requests.iter().map(|fields| {
            let mut request = Request::post("http://localhost/a/b").body(()).unwrap();
            for (name, value) in fields {
                let name = http::HeaderName::try_from(name.as_str()).unwrap();
                // DEL is the only one of these that no header may contain.
                let value = value.iter().copied().filter(|byte| *byte != 0x7f).collect::<Vec<_>>();
                request.headers_mut().append(name, value.try_into().unwrap());
            }
            request
        }).collect();
        let seen = block_on(async {
            let (client, server) = duplex(1 << 16);
            let (tell, mut seen) = mpsc::unbounded_channel();
            tokio::spawn(serve(Connection::new(server), tell));
            let (mut send, connection) = h2::client::handshake(client).await.unwrap();
            tokio::spawn(connection);
            let mut all = Vec::new();
            for request in &requests {
                send = send.ready().await.unwrap();
                let mut copy = Request::post(request.uri()).body(()).unwrap();
                *copy.headers_mut() = request.headers().clone();
                let (response, _) = send.send_request(copy, true).unwrap();
                response.await.unwrap();
                all.push(seen.recv().await.unwrap().request);
            }
            all
        });
        for (sent, seen) in requests.iter().zip(&seen) {
            prop_assert_eq!(sent.uri(), seen.uri());
            prop_assert_eq!(sent.headers(), seen.headers());
        }
        prop_assert_eq!(requests.len(), seen.len());
    }
}
