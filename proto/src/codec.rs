//! The codec of every service and client. Most messages are small, and each call makes a buffer for what it receives and one for what it
//! sends, so these begin small.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::ProstCodec;

/// Bytes of a buffer at the begin of a call. It grows with its message.
const BUFFER_BYTES: usize = 1 << 10;
/// Bytes of a stream's messages after which they are passed on: as many as tonic has for all codecs.
const PASSED_ON_BYTES: usize = 32 << 10;

/// Encodes `T` and decodes `U`.
#[derive(Debug, Clone, Copy)]
pub struct SmallCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for SmallCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for SmallCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as Codec>::Encoder;
    type Decoder = <ProstCodec<T, U> as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(settings())
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(settings())
    }
}

fn settings() -> BufferSettings {
    BufferSettings::new(BUFFER_BYTES, PASSED_ON_BYTES)
}
