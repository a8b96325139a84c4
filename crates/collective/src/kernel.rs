//! Reduction kernels: read P streams, combine them in a fixed order, write every result once.
//!
//! 1. Sources are combined in the order given, element by element, so equal inputs give equal bits
//!    on every rank.
//! 2. `f16` and `bf16` are combined in `f32` and rounded once, to nearest even, after division and
//!    postscale.
//! 3. A NaN in a result is always the positive quiet NaN without payload, and combining two values
//!    is commutative in every bit: neither the instruction set nor the order of two peers shows.
//! 4. An instruction set changes how many elements go at once, never what is computed for one.
#![expect(
    unsafe_code,
    reason = "kernels read and write memory that other ranks share, with SIMD chosen at run time"
)]

use crate::{DType, ReduceOp, Reduction};
use half::{bf16, f16};
use std::hint::select_unpredictable;
use std::mem::transmute;
use std::sync::atomic::{AtomicU8, Ordering, compiler_fence};

/// What to do besides combining.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Steps {
    /// How two elements become one.
    pub op: ReduceOp,
    /// Factor on every input; 1 is free.
    pub prescale: f64,
    /// Divisor of the result: the number of ranks at the end of a mean; 1 is free.
    pub divide_by: usize,
    /// Factor on the result after the division; 1 is free.
    pub postscale: f64,
}

impl Steps {
    /// Everything that `reduction` asks for among `ranks` ranks.
    pub(crate) fn whole(reduction: Reduction, ranks: usize) -> Self {
        let Reduction { op, prescale, postscale } = reduction;
        Self { op, prescale, divide_by: if op == ReduceOp::Mean { ranks } else { 1 }, postscale }
    }

    /// Only combining: a mean of numbers is their sum so far, and [`finish`] divides it.
    pub(crate) fn combine(op: ReduceOp) -> Self {
        Self { op, prescale: 1.0, divide_by: 1, postscale: 1.0 }
    }
}

/// Writes to every destination the combination of all sources, in their order.
///
/// # Safety
/// Every pointer is valid for `len` elements of `dtype` and aligned for it. A destination may be
/// equal to a source; otherwise no destination overlaps another range. Nobody else writes the
/// ranges meanwhile, or reads a destination.
pub(crate) unsafe fn reduce(
    dtype: DType,
    steps: &Steps,
    srcs: &[*const u8],
    dsts: &[*mut u8],
    len: usize,
) {
    match Level::known() {
        // SAFETY: the caller's contract; the machine has the level.
        Some(level) => unsafe { kernel(level, dtype, steps.op)(steps, srcs, dsts, len) },
        // SAFETY: the caller's contract.
        None => unsafe { reduce_first(dtype, steps, srcs, dsts, len) },
    }
}

/// The first call of a process finds out the level; in its own function, so that later calls need
/// no stack.
///
/// # Safety
/// As [`reduce`].
#[cold]
#[inline(never)]
unsafe fn reduce_first(
    dtype: DType,
    steps: &Steps,
    srcs: &[*const u8],
    dsts: &[*mut u8],
    len: usize,
) {
    let level = Level::detect();
    LEVEL.store(level as u8, Ordering::Relaxed);
    // SAFETY: the caller's contract; the machine has the level.
    unsafe { kernel(level, dtype, steps.op)(steps, srcs, dsts, len) }
}

/// Multiplies `buffer` by `factor` in place.
///
/// # Safety
/// As [`reduce`] with `buffer` as the only source and destination.
pub(crate) unsafe fn prescale(dtype: DType, factor: f64, buffer: *mut u8, len: usize) {
    if factor != 1.0 {
        let steps = Steps { prescale: factor, ..Steps::combine(ReduceOp::Sum) };
        // SAFETY: the caller's contract.
        unsafe { reduce(dtype, &steps, &[buffer.cast_const()], &[buffer], len) }
    }
}

/// Divides and postscales `buffer` in place, as `steps` say.
///
/// # Safety
/// As [`reduce`] with `buffer` as the only source and destination.
pub(crate) unsafe fn finish(dtype: DType, steps: &Steps, buffer: *mut u8, len: usize) {
    if steps.divide_by > 1 || steps.postscale != 1.0 {
        let steps = Steps { prescale: 1.0, ..*steps };
        // SAFETY: the caller's contract.
        unsafe { reduce(dtype, &steps, &[buffer.cast_const()], &[buffer], len) }
    }
}

/// Makes every byte 0 or 1, so that memory that came from elsewhere is a valid `bool`.
///
/// # Safety
/// As [`reduce`] with `buffer` as the only source and destination.
pub(crate) unsafe fn canonical_bool(buffer: *mut u8, len: usize) {
    let steps = Steps::combine(ReduceOp::Max);
    // SAFETY: the caller's contract.
    unsafe { reduce(DType::Bool, &steps, &[buffer.cast_const()], &[buffer], len) }
}

/// Copies what another core reads next.
///
/// A staging buffer was read by its peers the last time around. Stores through the cache would have to take every
/// line back from them, one after the other; stores past it do not, and are several times faster from a page on.
///
/// # Safety
/// `from` is valid for reads of `bytes`, `to` for writes, and they do not overlap.
pub(crate) unsafe fn hand_over(from: *const u8, to: *mut u8, bytes: usize) {
    let mut done = 0;
    #[cfg(target_arch = "x86_64")]
    if bytes > 4096 && to.addr().is_multiple_of(64) {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
        while done + 64 <= bytes {
            // SAFETY: 64 bytes are left on both sides, and `to` is aligned. SSE2 is part of the architecture.
            unsafe {
                let line: [__m128i; 4] = std::array::from_fn(|part| {
                    _mm_loadu_si128(from.add(done).cast::<__m128i>().add(part))
                });
                for (part, value) in line.into_iter().enumerate() {
                    _mm_stream_si128(to.add(done).cast::<__m128i>().add(part), value);
                }
            }
            done += 64;
        }
        // Such stores are not ordered with the store that publishes them.
        // SAFETY: SSE is part of the architecture.
        unsafe { _mm_sfence() };
    }
    // SAFETY: what is left of both.
    unsafe { std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done) };
}

/// Copies what another core wrote last, out of memory that this core writes next: lines are fetched to be owned at
/// once, so that the writes need not ask for them again.
///
/// # Safety
/// `from` is valid for reads and writes of `bytes`, `to` for writes, and they do not overlap.
pub(crate) unsafe fn take_over(from: *const u8, to: *mut u8, bytes: usize) {
    let mut done = 0;
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{
            __m128i, _MM_HINT_ET0, _mm_loadu_si128, _mm_prefetch, _mm_storeu_si128,
        };
        const AHEAD: usize = 1024;
        while done + 64 <= bytes {
            // SAFETY: 64 bytes are left on both sides; a prefetch may name any address. SSE2 is part of the
            // architecture.
            unsafe {
                _mm_prefetch::<_MM_HINT_ET0>(from.wrapping_add(done + AHEAD).cast());
                let line: [__m128i; 4] = std::array::from_fn(|part| {
                    _mm_loadu_si128(from.add(done).cast::<__m128i>().add(part))
                });
                for (part, value) in line.into_iter().enumerate() {
                    _mm_storeu_si128(to.add(done).cast::<__m128i>().add(part), value);
                }
            }
            done += 64;
        }
    }
    // SAFETY: what is left of both.
    unsafe { std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done) };
}

/// One kernel: an instruction set, an element type and an operation.
type Kernel = unsafe fn(&Steps, &[*const u8], &[*mut u8], usize);

/// An instruction set, chosen at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Level {
    /// What every machine of this architecture has.
    Portable = 1,
    #[cfg(target_arch = "x86_64")]
    Avx2 = 2,
    #[cfg(target_arch = "x86_64")]
    Avx512 = 3,
}

/// The code of this machine's best level; 0 until the first call.
static LEVEL: AtomicU8 = AtomicU8::new(0);

impl Level {
    #[inline(always)]
    fn known() -> Option<Self> {
        match LEVEL.load(Ordering::Relaxed) {
            1 => Some(Self::Portable),
            #[cfg(target_arch = "x86_64")]
            2 => Some(Self::Avx2),
            #[cfg(target_arch = "x86_64")]
            3 => Some(Self::Avx512),
            _ => None,
        }
    }

    /// The best level of this machine.
    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            let wider = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            return if wider { Self::Avx512 } else { Self::Avx2 };
        }
        Self::Portable
    }
}

#[inline]
fn kernel(level: Level, dtype: DType, op: ReduceOp) -> Kernel {
    match level {
        Level::Portable => of_dtype::<Portable, f16>(dtype, op),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => of_dtype::<x86::Avx2, x86::F16>(dtype, op),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => of_dtype::<x86::Avx512, x86::F16>(dtype, op),
    }
}

/// Picks a kernel; the compiler makes three table look-ups of it.
///
/// The last two parameters of a lane are its block lengths: long ones are 256 bytes of numbers,
/// four to eight registers; short ones serve what is less than a long one.
#[inline(always)]
fn of_dtype<S: InstructionSet, Half: Lane<Number = f32>>(dtype: DType, op: ReduceOp) -> Kernel {
    match dtype {
        DType::Bool => match op {
            // The mean of truth values is true where all are.
            ReduceOp::Mean => of_op::<S, Bool, 256, 16>(ReduceOp::Min),
            _ => of_op::<S, Bool, 256, 16>(op),
        },
        DType::U8 => of_op::<S, u8, 256, 16>(op),
        DType::I8 => of_op::<S, i8, 256, 16>(op),
        DType::I16 => of_op::<S, i16, 128, 8>(op),
        DType::I32 => of_op::<S, i32, 64, 8>(op),
        DType::I64 => of_op::<S, i64, 32, 4>(op),
        DType::F16 => of_op::<S, Half, 64, 8>(op),
        DType::Bf16 => of_op::<S, bf16, 64, 8>(op),
        DType::F32 => of_op::<S, f32, 64, 8>(op),
        DType::F64 => of_op::<S, f64, 32, 4>(op),
    }
}

#[inline(always)]
fn of_op<S: InstructionSet, L: Lane, const B: usize, const M: usize>(op: ReduceOp) -> Kernel {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => S::kernel::<L, Sum, B, M>(),
        ReduceOp::Min => S::kernel::<L, Min, B, M>(),
        ReduceOp::Max => S::kernel::<L, Max, B, M>(),
        ReduceOp::Product => S::kernel::<L, Product, B, M>(),
    }
}

trait InstructionSet {
    fn kernel<L: Lane, O: Combine, const B: usize, const M: usize>() -> Kernel;
}

struct Portable;

impl InstructionSet for Portable {
    #[inline(always)]
    fn kernel<L: Lane, O: Combine, const B: usize, const M: usize>() -> Kernel {
        portable::<L, O, B, M>
    }
}

/// # Safety
/// As [`reduce`], where the type is `L`.
unsafe fn portable<L: Lane, O: Combine, const B: usize, const M: usize>(
    steps: &Steps,
    srcs: &[*const u8],
    dsts: &[*mut u8],
    len: usize,
) {
    // SAFETY: the caller's contract.
    unsafe { body::<L, O, B, M>(portable::<L, O, B, M>, steps, srcs, dsts, len) }
}

/// One type of element in memory and the number it stands for.
trait Lane: Copy + Default {
    type Number: Number;

    /// Whether the number is the element itself, so that it may go back to memory between steps.
    const EXACT: bool = false;

    fn widen(self) -> Self::Number;
    fn narrow(number: Self::Number) -> Self;

    /// Overridden where an instruction converts several at once.
    #[inline(always)]
    fn widen_all<const B: usize>(lanes: [Self; B]) -> [Self::Number; B] {
        widen_each(lanes)
    }

    #[inline(always)]
    fn narrow_all<const B: usize>(numbers: [Self::Number; B]) -> [Self; B] {
        narrow_each(numbers)
    }
}

#[inline(always)]
fn widen_each<L: Lane, const B: usize>(lanes: [L; B]) -> [L::Number; B] {
    let mut numbers = [L::Number::default(); B];
    for i in 0..B {
        numbers[i] = lanes[i].widen();
    }
    numbers
}

#[inline(always)]
fn narrow_each<L: Lane, const B: usize>(numbers: [L::Number; B]) -> [L; B] {
    let mut lanes = [L::default(); B];
    for i in 0..B {
        lanes[i] = L::narrow(numbers[i]);
    }
    lanes
}

/// The type that elements are combined in.
trait Number: Copy + Default {
    type Factor: Copy;
    type Divisor: Copy;

    fn factor(factor: f64) -> Self::Factor;
    fn divisor(divisor: usize) -> Self::Divisor;
    fn scale(self, factor: Self::Factor) -> Self;
    fn divide(self, divisor: Self::Divisor) -> Self;
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
}

trait Combine {
    fn combine<N: Number>(one: N, other: N) -> N;
}

macro_rules! operations {
    ($($name:ident => $function:ident),+) => {$(
        struct $name;

        impl Combine for $name {
            #[inline(always)]
            fn combine<N: Number>(one: N, other: N) -> N {
                one.$function(other)
            }
        }
    )+};
}

operations!(Sum => sum, Product => product, Min => smaller, Max => larger);

macro_rules! floats {
    ($($float:ident),+) => {$(
        impl Lane for $float {
            type Number = Self;

            #[inline(always)]
            fn widen(self) -> Self {
                self
            }

            #[inline(always)]
            fn narrow(number: Self) -> Self {
                select_unpredictable(number.is_nan(), Self::NAN, number)
            }
        }

        impl Number for $float {
            type Factor = Self;
            type Divisor = Self;

            #[inline(always)]
            fn factor(factor: f64) -> Self {
                factor as Self
            }

            #[inline(always)]
            fn divisor(divisor: usize) -> Self {
                divisor as Self
            }

            #[inline(always)]
            fn scale(self, factor: Self) -> Self {
                self * factor
            }

            #[inline(always)]
            fn divide(self, divisor: Self) -> Self {
                self / divisor
            }

            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self * other
            }

            // Equal numbers differ in bits only when they are zeros of both signs: the signs
            // decide.
            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                let smaller = select_unpredictable(self < other || self.is_nan(), self, other);
                let signs = Self::from_bits(self.to_bits() | other.to_bits());
                select_unpredictable(self == other, signs, smaller)
            }

            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                let larger = select_unpredictable(self > other || self.is_nan(), self, other);
                let signs = Self::from_bits(self.to_bits() & other.to_bits());
                select_unpredictable(self == other, signs, larger)
            }
        }
    )+};
}

floats!(f32, f64);

macro_rules! integers {
    ($($integer:ident divided as $divisor:ident to $quotient:ident),+ $(,)?) => {$(
        impl Lane for $integer {
            type Number = Self;

            const EXACT: bool = true;

            #[inline(always)]
            fn widen(self) -> Self {
                self
            }

            #[inline(always)]
            fn narrow(number: Self) -> Self {
                number
            }
        }

        impl Number for $integer {
            type Factor = f64;
            type Divisor = $divisor;

            #[inline(always)]
            fn factor(factor: f64) -> f64 {
                factor
            }

            #[inline(always)]
            fn divisor(divisor: usize) -> $divisor {
                divisor as $divisor
            }

            #[inline(always)]
            fn scale(self, factor: f64) -> Self {
                (self as f64 * factor) as Self
            }

            #[inline(always)]
            fn divide(self, divisor: $divisor) -> Self {
                (self as $divisor / divisor) as $quotient as Self
            }

            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                if self < other { self } else { other }
            }

            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                if self > other { self } else { other }
            }
        }
    )+};
}

// Floats divide in vectors, and exactly: a quotient that is no integer is further from the next one
// than a float with so many more bits rounds. 64 bits leave no such float.
integers!(
    u8 divided as f32 to i32,
    i8 divided as f32 to i32,
    i16 divided as f32 to i32,
    i32 divided as f64 to i32,
    i64 divided as i64 to i64,
);

/// A truth value as it lies in memory that others wrote: zero is false, all else is true.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
struct Bool(u8);

/// A truth value: 0 or 1.
#[derive(Clone, Copy, Default)]
struct Truth(u8);

impl Lane for Bool {
    type Number = Truth;

    #[inline(always)]
    fn widen(self) -> Truth {
        Truth(u8::from(self.0 != 0))
    }

    #[inline(always)]
    fn narrow(number: Truth) -> Self {
        Self(number.0)
    }
}

impl Number for Truth {
    /// What true becomes; false stays false under any factor.
    type Factor = u8;
    type Divisor = ();

    #[inline(always)]
    fn factor(factor: f64) -> u8 {
        u8::from(factor as u8 != 0)
    }

    #[inline(always)]
    fn divisor(_: usize) {}

    #[inline(always)]
    fn scale(self, factor: u8) -> Self {
        Self(self.0 & factor)
    }

    #[inline(always)]
    fn divide(self, (): ()) -> Self {
        self
    }

    #[inline(always)]
    fn sum(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    #[inline(always)]
    fn product(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Lane for bf16 {
    type Number = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(number: f32) -> Self {
        Self::from_bits((rounded_to_bf16(number) >> 16) as u16)
    }

    // Two neighbours are taken apart and put together inside a 32-bit word: in half the
    // instructions that widening each takes. The numbers of one half of all words come first, then
    // the others: no order matters between widening and narrowing.
    #[inline(always)]
    fn widen_all<const B: usize>(lanes: [Self; B]) -> [f32; B] {
        if !B.is_multiple_of(64) {
            return widen_each(lanes);
        }
        let mut numbers = [0.0; B];
        let (pairs, _) = lanes.as_chunks::<2>();
        let (ones, others) = numbers.split_at_mut(pairs.len());
        for ((pair, one), other) in pairs.iter().zip(ones).zip(others) {
            // SAFETY: both are four plain bytes.
            let word = unsafe { transmute::<[Self; 2], u32>(*pair) };
            *one = f32::from_bits(word << 16);
            *other = f32::from_bits(word & 0xffff_0000);
        }
        numbers
    }

    #[inline(always)]
    fn narrow_all<const B: usize>(numbers: [f32; B]) -> [Self; B] {
        if !B.is_multiple_of(64) {
            return narrow_each(numbers);
        }
        let mut lanes = [Self::ZERO; B];
        let (pairs, _) = lanes.as_chunks_mut::<2>();
        let (ones, others) = numbers.split_at(pairs.len());
        for ((pair, one), other) in pairs.iter_mut().zip(ones).zip(others) {
            let word = rounded_to_bf16(*one) >> 16 | rounded_to_bf16(*other) & 0xffff_0000;
            // SAFETY: both are four plain bytes.
            *pair = unsafe { transmute::<u32, [Self; 2]>(word) };
        }
        lanes
    }
}

/// The bits of `number`, of which the upper half is the nearest `bf16`.
#[inline(always)]
fn rounded_to_bf16(number: f32) -> u32 {
    let bits = number.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    select_unpredictable(number.is_nan(), f32::NAN.to_bits(), rounded)
}

/// Without branches, so that it vectorises: the conversions of `half` test the processor each time.
impl Lane for f16 {
    type Number = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7fff) << 13;
        // An exact product moves the exponent from bias 15 to bias 127 and normalises subnormals.
        let finite = f32::from_bits(magnitude) * f32::from_bits((127 + 127 - 15) << 23);
        let special = f32::from_bits(magnitude | 0x7f80_0000);
        let unsigned = select_unpredictable(magnitude >= 0x0f80_0000, special, finite);
        f32::from_bits(unsigned.to_bits() | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(number: f32) -> Self {
        let bits = number.to_bits();
        let sign = (bits >> 16 & 0x8000) as u16;
        let magnitude = bits & 0x7fff_ffff;
        // Adding a half lets the adder round tiny ones to multiples of the smallest subnormal.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let odd = magnitude >> 13 & 1;
        let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + odd) >> 13;
        let finite = select_unpredictable(magnitude < (127 - 14) << 23, subnormal, normal);
        // Everything from 65520 up rounds to infinity.
        let rounded = select_unpredictable(magnitude >= 0x477f_f000, 0x7c00, finite) as u16;
        let signed = sign | rounded;
        Self::from_bits(select_unpredictable(number.is_nan(), Self::NAN.to_bits(), signed))
    }
}

/// The optional steps, in the type that is combined in.
#[derive(Clone, Copy)]
struct Plan<N: Number> {
    prescale: Option<N::Factor>,
    divide: Option<N::Divisor>,
    postscale: Option<N::Factor>,
}

impl<N: Number> Plan<N> {
    const NOTHING: Self = Self { prescale: None, divide: None, postscale: None };

    #[inline(always)]
    fn new(steps: &Steps) -> Self {
        Self {
            prescale: (steps.prescale != 1.0).then(|| N::factor(steps.prescale)),
            divide: (steps.divide_by > 1).then(|| N::divisor(steps.divide_by)),
            postscale: (steps.postscale != 1.0).then(|| N::factor(steps.postscale)),
        }
    }

    // Loops, not `map`: the standard library's is not always inlined, and then no number stays in a
    // register.
    #[inline(always)]
    fn prepare(self, numbers: &mut [N]) {
        if let Some(factor) = self.prescale {
            for number in numbers {
                *number = number.scale(factor);
            }
        }
    }

    #[inline(always)]
    fn finish(self, numbers: &mut [N]) {
        if let Some(divisor) = self.divide {
            for number in &mut *numbers {
                *number = number.divide(divisor);
            }
        }
        if let Some(factor) = self.postscale {
            for number in numbers {
                *number = number.scale(factor);
            }
        }
    }
}

/// # Safety
/// As [`reduce`], where the type is `L`; the machine has the instructions of `L`; `kernel` is the
/// function that calls this.
#[inline(always)]
unsafe fn body<L: Lane, O: Combine, const B: usize, const M: usize>(
    kernel: Kernel,
    steps: &Steps,
    srcs: &[*const u8],
    dsts: &[*mut u8],
    len: usize,
) {
    let mut plan = Plan::<L::Number>::new(steps);
    if L::EXACT {
        if plan.prescale.is_some() || plan.divide.is_some() || plan.postscale.is_some() {
            // SAFETY: the caller's contract.
            return unsafe { step_by_step::<L::Number>(kernel, steps, srcs, dsts, len) };
        }
        plan = Plan::NOTHING;
    }
    // SAFETY: the caller's contract.
    unsafe {
        if len >= B {
            blocks::<L, O, B>(plan, srcs, dsts, len);
        } else if len >= M {
            blocks::<L, O, M>(plan, srcs, dsts, len);
        } else if len > 0 {
            blocks::<L, O, 1>(plan, srcs, dsts, len);
        }
    }
}

/// All elements, `B` at a time.
///
/// The last block ends with the last element and may overlap the one before. So that it sees no
/// result of that one where a destination is also a source, it is computed first and written last:
/// elements in both get the same bits twice.
///
/// # Safety
/// As [`body`], with `len >= B`.
#[inline(always)]
unsafe fn blocks<L: Lane, O: Combine, const B: usize>(
    plan: Plan<L::Number>,
    srcs: &[*const u8],
    dsts: &[*mut u8],
    len: usize,
) {
    // SAFETY: the caller's contract; every block lies within `len`.
    unsafe {
        let last = combined::<L, O, B>(plan, srcs, len - B);
        let mut at = 0;
        while at < len - B {
            store(combined::<L, O, B>(plan, srcs, at), dsts, at);
            at += B;
        }
        store(last, dsts, len - B);
    }
}

/// Scales and divides integers in passes of their own over pieces that stay in the first cache.
///
/// Inside the kernels these long conversions would be compiled for each operation and instruction
/// set, and keep numbers from staying in registers.
///
/// # Safety
/// As [`reduce`], where the type is `N`; `kernel` combines elements of `N` as `steps` say.
#[inline(never)]
unsafe fn step_by_step<N: Number>(
    kernel: Kernel,
    steps: &Steps,
    srcs: &[*const u8],
    dsts: &[*mut u8],
    len: usize,
) {
    const PIECE: usize = 128;
    let Some((first, rest)) = srcs.split_first() else { return };
    let plan = Plan::<N>::new(steps);
    let mut total = [N::default(); PIECE];
    let mut next = [N::default(); PIECE];
    for at in (0..len).step_by(PIECE) {
        let piece = Ord::min(len - at, PIECE);
        let (total, next) = (&mut total[..piece], &mut next[..piece]);
        // SAFETY: the caller's contract; each buffer holds `piece` elements.
        unsafe {
            total.as_mut_ptr().copy_from_nonoverlapping(first.cast::<N>().add(at), piece);
            plan.prepare(total);
            for src in rest {
                next.as_mut_ptr().copy_from_nonoverlapping(src.cast::<N>().add(at), piece);
                plan.prepare(next);
                let one = total.as_mut_ptr().cast::<u8>();
                let other = next.as_ptr().cast::<u8>();
                kernel(&Steps::combine(steps.op), &[one.cast_const(), other], &[one], piece);
            }
            plan.finish(total);
            for dst in dsts {
                dst.cast::<N>().add(at).copy_from_nonoverlapping(total.as_ptr(), piece);
            }
        }
    }
}

/// The results for elements `at..at + B`, which stay in registers meanwhile.
///
/// # Safety
/// As [`body`], with `at + B <= len`.
#[inline(always)]
unsafe fn combined<L: Lane, O: Combine, const B: usize>(
    plan: Plan<L::Number>,
    srcs: &[*const u8],
    at: usize,
) -> [L; B] {
    let Some((first, rest)) = srcs.split_first() else { return [L::default(); B] };
    // SAFETY: the caller's contract.
    let mut numbers = unsafe { load::<L, B>(plan, *first, at) };
    for src in rest {
        keep_as_loop();
        // SAFETY: the caller's contract.
        let others = unsafe { load::<L, B>(plan, *src, at) };
        for i in 0..B {
            numbers[i] = O::combine(numbers[i], others[i]);
        }
    }
    plan.finish(&mut numbers);
    L::narrow_all(numbers)
}

/// Keeps the compiler from vectorising a loop over sources or destinations instead of elements,
/// with gathers and scatters. It emits no instruction.
#[inline(always)]
fn keep_as_loop() {
    compiler_fence(Ordering::SeqCst);
}

/// # Safety
/// As [`body`], with `at + B <= len`.
#[inline(always)]
unsafe fn store<L: Lane, const B: usize>(lanes: [L; B], dsts: &[*mut u8], at: usize) {
    for dst in dsts {
        keep_as_loop();
        // SAFETY: the caller's contract.
        unsafe { dst.cast::<L>().add(at).cast::<[L; B]>().write(lanes) }
    }
}

/// # Safety
/// As [`combined`].
#[inline(always)]
unsafe fn load<L: Lane, const B: usize>(
    plan: Plan<L::Number>,
    src: *const u8,
    at: usize,
) -> [L::Number; B] {
    // SAFETY: the caller's contract.
    let lanes = unsafe { src.cast::<L>().add(at).cast::<[L; B]>().read() };
    let mut numbers = L::widen_all(lanes);
    plan.prepare(&mut numbers);
    numbers
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! The same body compiled for wider registers.

    use super::{Combine, InstructionSet, Kernel, Lane, Steps, body, narrow_each, widen_each};
    use half::f16;
    use std::arch::x86_64::{
        __m128i, __m256, _MM_FROUND_TO_NEAREST_INT, _mm256_cvtph_ps, _mm256_cvtps_ph,
    };
    use std::mem::transmute;

    pub(super) struct Avx2;
    pub(super) struct Avx512;

    impl InstructionSet for Avx2 {
        #[inline(always)]
        fn kernel<L: Lane, O: Combine, const B: usize, const M: usize>() -> Kernel {
            avx2::<L, O, B, M>
        }
    }

    impl InstructionSet for Avx512 {
        #[inline(always)]
        fn kernel<L: Lane, O: Combine, const B: usize, const M: usize>() -> Kernel {
            avx512::<L, O, B, M>
        }
    }

    /// # Safety
    /// As [`super::reduce`], where the type is `L`; the machine has the features.
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn avx2<L: Lane, O: Combine, const B: usize, const M: usize>(
        steps: &Steps,
        srcs: &[*const u8],
        dsts: &[*mut u8],
        len: usize,
    ) {
        // SAFETY: the caller's contract.
        unsafe { body::<L, O, B, M>(avx2::<L, O, B, M>, steps, srcs, dsts, len) }
    }

    /// # Safety
    /// As [`super::reduce`], where the type is `L`; the machine has the features.
    #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
    unsafe fn avx512<L: Lane, O: Combine, const B: usize, const M: usize>(
        steps: &Steps,
        srcs: &[*const u8],
        dsts: &[*mut u8],
        len: usize,
    ) {
        // SAFETY: the caller's contract.
        unsafe { body::<L, O, B, M>(avx512::<L, O, B, M>, steps, srcs, dsts, len) }
    }

    /// An `f16` that is converted by instructions, eight at a time; only for functions that enable
    /// them.
    #[derive(Clone, Copy, Default)]
    #[repr(transparent)]
    pub(super) struct F16(f16);

    impl Lane for F16 {
        type Number = f32;

        #[inline(always)]
        fn widen(self) -> f32 {
            self.0.widen()
        }

        #[inline(always)]
        fn narrow(number: f32) -> Self {
            Self(f16::narrow(number))
        }

        #[inline(always)]
        fn widen_all<const B: usize>(lanes: [Self; B]) -> [f32; B] {
            if !B.is_multiple_of(8) {
                return widen_each(lanes);
            }
            let mut numbers = [0.0; B];
            let (eights, _) = lanes.as_chunks::<8>();
            let (wide, _) = numbers.as_chunks_mut::<8>();
            for (numbers, lanes) in wide.iter_mut().zip(eights) {
                // SAFETY: all are plain memory of equal size; the machine has F16C, or this lane
                // would not be in use.
                unsafe {
                    let lanes = transmute::<[Self; 8], __m128i>(*lanes);
                    *numbers = transmute::<__m256, [f32; 8]>(_mm256_cvtph_ps(lanes));
                }
            }
            numbers
        }

        #[inline(always)]
        fn narrow_all<const B: usize>(mut numbers: [f32; B]) -> [Self; B] {
            if !B.is_multiple_of(8) {
                return narrow_each(numbers);
            }
            // Only for the NaNs: the instruction keeps a payload.
            for number in &mut numbers {
                *number = f32::narrow(*number);
            }
            let mut lanes = [Self(f16::ZERO); B];
            let (eights, _) = lanes.as_chunks_mut::<8>();
            let (wide, _) = numbers.as_chunks::<8>();
            for (lanes, numbers) in eights.iter_mut().zip(wide) {
                // SAFETY: as in `widen_all`.
                unsafe {
                    let numbers = transmute::<[f32; 8], __m256>(*numbers);
                    let narrow = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(numbers);
                    *lanes = transmute::<__m128i, [Self; 8]>(narrow);
                }
            }
            lanes
        }
    }

    /// What the conversion instruction makes of `number`.
    #[cfg(test)]
    pub(super) fn narrow_eight(number: f32) -> f16 {
        F16::narrow_all([number; 8])[0].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LENGTHS: [usize; 17] =
        [0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 191, 256, 257, 1000];

    fn levels() -> Vec<Level> {
        let all = [
            Level::Portable,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512,
        ];
        all.into_iter().filter(|level| *level as u8 <= Level::detect() as u8).collect()
    }

    /// One element as its bytes, read by the reference without any code of the kernels.
    #[derive(Clone, Copy)]
    enum Value {
        Integer(i64),
        Single(f32),
        Double(f64),
        Truth(bool),
    }

    fn read(dtype: DType, bytes: &[u8]) -> Value {
        match dtype {
            DType::Bool => Value::Truth(bytes[0] != 0),
            DType::U8 => Value::Integer(i64::from(bytes[0])),
            DType::I8 => Value::Integer(i64::from(bytes[0] as i8)),
            DType::I16 => Value::Integer(i64::from(i16::from_ne_bytes(bytes.try_into().unwrap()))),
            DType::I32 => Value::Integer(i64::from(i32::from_ne_bytes(bytes.try_into().unwrap()))),
            DType::I64 => Value::Integer(i64::from_ne_bytes(bytes.try_into().unwrap())),
            DType::F16 => Value::Single(f16::from_ne_bytes(bytes.try_into().unwrap()).to_f32()),
            DType::Bf16 => Value::Single(bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f32()),
            DType::F32 => Value::Single(f32::from_ne_bytes(bytes.try_into().unwrap())),
            DType::F64 => Value::Double(f64::from_ne_bytes(bytes.try_into().unwrap())),
        }
    }

    fn write(dtype: DType, value: Value) -> Vec<u8> {
        match (dtype, value) {
            (DType::Bool, Value::Truth(value)) => vec![u8::from(value)],
            (DType::U8, Value::Integer(value)) => vec![value as u8],
            (DType::I8, Value::Integer(value)) => vec![value as u8],
            (DType::I16, Value::Integer(value)) => (value as i16).to_ne_bytes().to_vec(),
            (DType::I32, Value::Integer(value)) => (value as i32).to_ne_bytes().to_vec(),
            (DType::I64, Value::Integer(value)) => value.to_ne_bytes().to_vec(),
            (DType::F16, Value::Single(value)) if value.is_nan() => f16::NAN.to_ne_bytes().to_vec(),
            (DType::F16, Value::Single(value)) => f16::from_f32(value).to_ne_bytes().to_vec(),
            (DType::Bf16, Value::Single(value)) if value.is_nan() => {
                bf16::NAN.to_ne_bytes().to_vec()
            }
            (DType::Bf16, Value::Single(value)) => bf16::from_f32(value).to_ne_bytes().to_vec(),
            (DType::F32, Value::Single(value)) if value.is_nan() => f32::NAN.to_ne_bytes().to_vec(),
            (DType::F32, Value::Single(value)) => value.to_ne_bytes().to_vec(),
            (DType::F64, Value::Double(value)) if value.is_nan() => f64::NAN.to_ne_bytes().to_vec(),
            (DType::F64, Value::Double(value)) => value.to_ne_bytes().to_vec(),
            _ => unreachable!("{dtype:?} does not hold such a value"),
        }
    }

    /// Brings an integer back into the type, as its arithmetic wraps.
    fn wrap(dtype: DType, value: i64) -> Value {
        read(dtype, &write(dtype, Value::Integer(value)))
    }

    fn scale(dtype: DType, value: Value, factor: f64) -> Value {
        match value {
            _ if factor == 1.0 => value,
            Value::Integer(value) => Value::Integer(match dtype {
                DType::U8 => i64::from((value as f64 * factor) as u8),
                DType::I8 => i64::from((value as f64 * factor) as i8),
                DType::I16 => i64::from((value as f64 * factor) as i16),
                DType::I32 => i64::from((value as f64 * factor) as i32),
                _ => (value as f64 * factor) as i64,
            }),
            Value::Single(value) => Value::Single(value * factor as f32),
            Value::Double(value) => Value::Double(value * factor),
            Value::Truth(value) => Value::Truth((f64::from(u8::from(value)) * factor) as u8 != 0),
        }
    }

    fn extreme(one: f64, other: f64, smallest: bool) -> f64 {
        let one_wins = match one.partial_cmp(&other) {
            None => return f64::NAN,
            Some(std::cmp::Ordering::Equal) => one.is_sign_negative() == smallest,
            Some(order) => order.is_lt() == smallest,
        };
        if one_wins { one } else { other }
    }

    fn combine(dtype: DType, op: ReduceOp, one: Value, other: Value) -> Value {
        match (one, other) {
            (Value::Integer(one), Value::Integer(other)) => match op {
                ReduceOp::Sum | ReduceOp::Mean => wrap(dtype, one.wrapping_add(other)),
                ReduceOp::Product => wrap(dtype, one.wrapping_mul(other)),
                ReduceOp::Min => Value::Integer(Ord::min(one, other)),
                ReduceOp::Max => Value::Integer(Ord::max(one, other)),
            },
            (Value::Single(one), Value::Single(other)) => Value::Single(match op {
                ReduceOp::Sum | ReduceOp::Mean => one + other,
                ReduceOp::Product => one * other,
                _ => extreme(f64::from(one), f64::from(other), op == ReduceOp::Min) as f32,
            }),
            (Value::Double(one), Value::Double(other)) => Value::Double(match op {
                ReduceOp::Sum | ReduceOp::Mean => one + other,
                ReduceOp::Product => one * other,
                _ => extreme(one, other, op == ReduceOp::Min),
            }),
            (Value::Truth(one), Value::Truth(other)) => Value::Truth(match op {
                ReduceOp::Sum | ReduceOp::Max => one || other,
                ReduceOp::Mean | ReduceOp::Min | ReduceOp::Product => one && other,
            }),
            _ => unreachable!("values of one type"),
        }
    }

    fn divide(value: Value, divisor: usize) -> Value {
        match value {
            _ if divisor == 1 => value,
            Value::Integer(value) => Value::Integer(value / divisor as i64),
            Value::Single(value) => Value::Single(value / divisor as f32),
            Value::Double(value) => Value::Double(value / divisor as f64),
            Value::Truth(_) => value,
        }
    }

    fn reference(dtype: DType, steps: &Steps, srcs: &[Vec<u8>]) -> Vec<u8> {
        let size = dtype.size();
        (0..srcs[0].len() / size)
            .flat_map(|i| {
                let inputs = srcs.iter().map(|src| read(dtype, &src[i * size..(i + 1) * size]));
                let combined = inputs
                    .map(|value| scale(dtype, value, steps.prescale))
                    .reduce(|one, other| combine(dtype, steps.op, one, other))
                    .unwrap();
                write(dtype, scale(dtype, divide(combined, steps.divide_by), steps.postscale))
            })
            .collect()
    }

    /// Memory aligned for an element and for no more, so that no kernel comes to rely on more.
    struct Memory {
        words: Vec<u64>,
        offset: usize,
        bytes: usize,
    }

    impl Memory {
        fn new(dtype: DType, content: &[u8]) -> Self {
            let mut memory = Self {
                words: vec![0; content.len() / 8 + 4],
                offset: dtype.size(),
                bytes: content.len(),
            };
            memory.bytes_mut().copy_from_slice(content);
            memory
        }

        fn bytes_mut(&mut self) -> &mut [u8] {
            // SAFETY: the bytes lie within the vector.
            unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.bytes) }
        }

        fn pointer(&mut self) -> *mut u8 {
            self.words.as_mut_ptr().cast::<u8>().wrapping_add(self.offset)
        }
    }

    /// Runs a kernel with the first `in_place` sources also as destinations and `fresh` further
    /// destinations.
    fn run(
        level: Level,
        dtype: DType,
        steps: &Steps,
        srcs: &[Vec<u8>],
        in_place: usize,
        fresh: usize,
    ) -> Vec<Vec<u8>> {
        let mut inputs: Vec<_> = srcs.iter().map(|src| Memory::new(dtype, src)).collect();
        let mut outputs: Vec<_> =
            (0..fresh).map(|_| Memory::new(dtype, &vec![0xa5; srcs[0].len()])).collect();
        let pointers: Vec<_> = inputs.iter_mut().map(|input| input.pointer()).collect();
        let sources: Vec<_> = pointers.iter().map(|pointer| pointer.cast_const()).collect();
        let mut destinations = pointers[..in_place].to_vec();
        destinations.extend(outputs.iter_mut().map(|output| output.pointer()));
        // SAFETY: every pointer is valid for the length of the first source, which all sources
        // have.
        unsafe {
            kernel(level, dtype, steps.op)(
                steps,
                &sources,
                &destinations,
                srcs[0].len() / dtype.size(),
            )
        };
        for (untouched, src) in inputs[in_place..].iter_mut().zip(&srcs[in_place..]) {
            assert_eq!(untouched.bytes_mut(), src, "a source that is no destination was written");
        }
        inputs[..in_place]
            .iter_mut()
            .chain(&mut outputs)
            .map(|memory| memory.bytes_mut().to_vec())
            .collect()
    }

    fn check(dtype: DType, steps: &Steps, srcs: &[Vec<u8>], in_place: usize, fresh: usize) {
        let expected = reference(dtype, steps, srcs);
        for level in levels() {
            for result in run(level, dtype, steps, srcs, in_place, fresh) {
                if let Some(at) = (0..expected.len()).find(|at| result[*at] != expected[*at]) {
                    let element =
                        at / dtype.size() * dtype.size()..(at / dtype.size() + 1) * dtype.size();
                    let inputs: Vec<_> = srcs.iter().map(|src| &src[element.clone()]).collect();
                    panic!(
                        "{level:?} {dtype:?} {steps:?} {} of {}: {inputs:x?} gave {:x?}, not {:x?}",
                        at / dtype.size(),
                        expected.len() / dtype.size(),
                        &result[element.clone()],
                        &expected[element]
                    );
                }
            }
        }
    }

    /// Bytes without order: every kind of number comes up in the small types, NaN and subnormals
    /// too.
    fn noise(seed: u64, bytes: usize) -> Vec<u8> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        (0..bytes)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 24) as u8
            })
            .collect()
    }

    /// Mostly moderate numbers, some special ones: noise alone overflows a float too often to say
    /// much.
    fn numbers(dtype: DType, seed: u64, len: usize) -> Vec<u8> {
        let random = noise(seed, len * dtype.size());
        let specials = [
            0.0,
            -0.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            -f32::NAN,
            65504.0,
            6e-8,
            1e-40,
            -1e-5,
        ];
        let float = |bytes: &[u8]| match bytes[0] {
            picked @ 0..40 => specials[usize::from(picked % 10)],
            _ => (f32::from(bytes[0]) - 140.0) / (f32::from(bytes[1]) + 3.0),
        };
        match dtype {
            DType::F16 => random
                .chunks(2)
                .flat_map(|bytes| f16::from_f32(float(bytes)).to_ne_bytes())
                .collect(),
            DType::Bf16 => random
                .chunks(2)
                .flat_map(|bytes| bf16::from_f32(float(bytes)).to_ne_bytes())
                .collect(),
            DType::F32 => random.chunks(4).flat_map(|bytes| float(bytes).to_ne_bytes()).collect(),
            DType::F64 => {
                random.chunks(8).flat_map(|bytes| f64::from(float(bytes)).to_ne_bytes()).collect()
            }
            DType::Bool => {
                random.iter().map(|byte| if byte % 3 == 0 { 0 } else { *byte }).collect()
            }
            _ => random,
        }
    }

    fn sources(dtype: DType, count: usize, len: usize) -> Vec<Vec<u8>> {
        (0..count).map(|seed| numbers(dtype, seed as u64 + 1, len)).collect()
    }

    const SCALES: [(f64, f64); 5] =
        [(1.0, 1.0), (0.5, 1.0), (1.0, -3.75), (1e3, 1e-3), (f64::NAN, f64::INFINITY)];

    #[test]
    fn every_type_operation_and_length_equals_the_reference() {
        for dtype in DType::ALL {
            for op in ReduceOp::ALL {
                for count in 1..=5 {
                    for len in LENGTHS {
                        let srcs = sources(dtype, count, len);
                        check(dtype, &Steps::combine(op), &srcs, 0, 1);
                        let (prescale, postscale) = SCALES[(len + count) % SCALES.len()];
                        let reduction = Reduction { op, prescale, postscale };
                        check(dtype, &Steps::whole(reduction, count), &srcs, 0, 1);
                        check(dtype, &Steps::whole(reduction, count), &srcs, count, 2);
                    }
                }
            }
        }
    }

    #[test]
    fn every_scale_equals_the_reference() {
        for dtype in DType::ALL {
            for op in ReduceOp::ALL {
                for (prescale, postscale) in SCALES {
                    for ranks in [1, 3, 128, 300] {
                        let steps = Steps::whole(Reduction { op, prescale, postscale }, ranks);
                        check(dtype, &steps, &sources(dtype, 3, 300), 1, 0);
                        check(
                            dtype,
                            &steps,
                            &(7..9).map(|seed| noise(seed, 2400)).collect::<Vec<_>>(),
                            0,
                            1,
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn as_many_sources_and_destinations_as_there_are_ranks() {
        for dtype in DType::ALL {
            for count in [6, 7, 8, 16, 33, 64] {
                let steps = Steps::whole(ReduceOp::Mean.into(), count);
                check(dtype, &steps, &sources(dtype, count, 77), count, 0);
                check(dtype, &steps, &sources(dtype, count, 77), 0, 64);
            }
        }
    }

    #[test]
    fn every_half_number_comes_back() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
        let srcs = [all];
        check(DType::F16, &Steps::combine(ReduceOp::Sum), &srcs, 0, 1);
        check(DType::Bf16, &Steps::combine(ReduceOp::Sum), &srcs, 0, 1);
        for bits in 0..=u16::MAX {
            for (wide, expected) in [
                (f16::from_bits(bits).widen(), f16::from_bits(bits).to_f32()),
                (bf16::from_bits(bits).widen(), bf16::from_bits(bits).to_f32()),
            ] {
                assert!(
                    wide.to_bits() == expected.to_bits() || wide.is_nan() && expected.is_nan(),
                    "{bits:x}"
                );
            }
        }
    }

    #[test]
    fn halves_round_to_nearest_even() {
        // Around every half number: the middle to the next one, and the neighbours of both in f32.
        let narrow = |number: f32| {
            let half = f16::narrow(number).to_bits();
            let brain = bf16::narrow(number).to_bits();
            if number.is_nan() {
                assert_eq!((half, brain), (f16::NAN.to_bits(), bf16::NAN.to_bits()));
            } else {
                assert_eq!(half, f16::from_f32_const(number).to_bits(), "{number:e}");
                assert_eq!(brain, bf16::from_f32_const(number).to_bits(), "{number:e}");
            }
            #[cfg(target_arch = "x86_64")]
            if Level::detect() != Level::Portable {
                assert_eq!(x86::narrow_eight(number).to_bits(), half, "{number:e}");
            }
        };
        for bits in 0..=u16::MAX {
            let middles =
                [f16::from_bits(bits).to_f32().to_bits() + 0x1000, u32::from(bits) << 16 | 0x8000];
            for middle in middles {
                for offset in [-0x1000, -1, 0, 1, 0xfff] {
                    narrow(f32::from_bits(middle.wrapping_add_signed(offset)));
                }
            }
            // Middles between subnormal halves are not a fixed distance in bits away.
            narrow((f32::from(bits) + 0.5) * 2f32.powi(-25));
        }
    }

    #[test]
    fn halves_are_rounded_once() {
        // In f16 itself 2048 + 1 is 2048 again, four times.
        let ones = f16::ONE.to_ne_bytes().to_vec();
        let srcs = [
            f16::from_f32(2048.0).to_ne_bytes().to_vec(),
            ones.clone(),
            ones.clone(),
            ones.clone(),
            ones,
        ];
        for level in levels() {
            let result = run(level, DType::F16, &Steps::combine(ReduceOp::Sum), &srcs, 0, 1);
            assert_eq!(result[0], f16::from_f32(2052.0).to_ne_bytes());
        }
    }

    #[test]
    fn in_place_steps_equal_the_whole() {
        // Where nothing is rounded between the steps: halves, for one, would be.
        for dtype in
            DType::ALL.into_iter().filter(|dtype| !matches!(dtype, DType::F16 | DType::Bf16))
        {
            for op in ReduceOp::ALL {
                for (pre, post) in SCALES {
                    let whole = Steps::whole(Reduction { op, prescale: pre, postscale: post }, 3);
                    let srcs = sources(dtype, 3, 200);
                    let mut inputs: Vec<_> =
                        srcs.iter().map(|src| Memory::new(dtype, src)).collect();
                    let mut output = Memory::new(dtype, &srcs[0]);
                    let pointers: Vec<_> =
                        inputs.iter_mut().map(|input| input.pointer().cast_const()).collect();
                    // SAFETY: every pointer is valid for 200 elements.
                    unsafe {
                        for pointer in &pointers {
                            prescale(dtype, pre, pointer.cast_mut(), 200);
                        }
                        reduce(dtype, &Steps::combine(op), &pointers, &[output.pointer()], 200);
                        finish(dtype, &whole, output.pointer(), 200);
                    }
                    assert_eq!(
                        output.bytes_mut(),
                        reference(dtype, &whole, &srcs),
                        "{dtype:?} {whole:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn any_byte_becomes_a_bool() {
        let mut bytes: Vec<u8> = (0..=255).chain(0..100).collect();
        // SAFETY: the vector's own memory.
        unsafe { canonical_bool(bytes.as_mut_ptr(), bytes.len()) };
        let expected: Vec<u8> = (0..=255).chain(0..100).map(|byte: u8| byte.min(1)).collect();
        assert_eq!(bytes, expected);
    }

    #[test]
    fn nothing_to_do_touches_nothing() {
        let dangling = std::ptr::without_provenance_mut(64);
        for dtype in DType::ALL {
            // SAFETY: no element is read or written.
            unsafe {
                reduce(dtype, &Steps::combine(ReduceOp::Sum), &[dangling], &[dangling], 0);
                prescale(dtype, 2.0, dangling, 0);
                prescale(dtype, 1.0, dangling, 1000);
                finish(dtype, &Steps::combine(ReduceOp::Sum), dangling, 1000);
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_equal_the_reference(
            dtype in proptest::sample::select(&DType::ALL[..]),
            op in proptest::sample::select(&ReduceOp::ALL[..]),
            count in 1..9usize,
            len in 0..300usize,
            seed: u64,
            prescale in prop_oneof![Just(1.0), any::<f64>(), -2.0..2.0],
            postscale in prop_oneof![Just(1.0), any::<f64>(), -2.0..2.0],
        ) {
            let steps = Steps::whole(Reduction { op, prescale, postscale }, count);
            let source = |i| noise(seed.wrapping_add(i), len * dtype.size());
            let srcs: Vec<_> = (0..count as u64).map(source).collect();
            check(dtype, &steps, &srcs, count / 2, 1);
        }
    }
}
